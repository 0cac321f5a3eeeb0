"""Rules about the nodes of a run."""

from __future__ import annotations

from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config


def check_nodes(config: Config, ranks: int, ranks_per_node: int) -> None:
    """Raise ConfigError where the settings do not fit this division of the ranks into nodes."""
    if config.policy.replicate is None:
        return
    setting = f"policy.replicate={config.policy.replicate}"
    if ranks <= ranks_per_node:
        raise ConfigError(f"{setting}: needs several nodes, and this run has one; leave it out")
    if ranks % ranks_per_node:
        raise ConfigError(
            f"{setting}: every node needs the same number of ranks, but {ranks} is not a multiple of {ranks_per_node}"
        )
