"""Settings of a run: schema, loading, and the rules between fields."""

from colocated_grpo.settings.schema import Config

__all__ = ["Config"]
