"""Atomic checkpoints with checksums, which can be read without running code."""

from colocated_grpo.checkpoint.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
