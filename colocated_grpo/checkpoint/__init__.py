"""Atomic checkpoints with checksums. Reading them runs no code."""

from colocated_grpo.checkpoint.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
