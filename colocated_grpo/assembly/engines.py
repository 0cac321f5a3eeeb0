"""The engines of a run, wherever they are, and what belongs to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from colocated_grpo.phases import WeightSync
from colocated_grpo.rollout.engine import LocalEngine, RolloutEngine


@dataclass(frozen=True, kw_only=True)
class Engines:
    """One set of engines with the same weights."""

    engine: RolloutEngine
    """All that this rank uses, as one."""
    local: LocalEngine | None
    """The engine in this process; None with engine servers."""
    sync: WeightSync
    dtype: torch.dtype
    """Type of their weights."""
    is_quantized: bool
    """True if the weights or the KV cache of any have 8 bits or fewer."""
