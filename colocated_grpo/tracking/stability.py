"""Warning about updates that are too large: the loss far below zero, or a ratio far above 1, for several steps."""

from __future__ import annotations

from collections.abc import Mapping

from colocated_grpo.tracking.text import number

LOWEST_LOSS = -10.0
HIGHEST_RATIO = 2.0
STEPS = 3


class StabilityWatch:
    """Counts consecutive steps out of bounds. Each such period is reported once."""

    def __init__(self) -> None:
        self._count = 0

    def check(self, row: Mapping[str, float]) -> str | None:
        """Return a warning at the third step in a row that is out of bounds; else None."""
        loss, ratio = row.get("loss", 0.0), row.get("ratio", 1.0)
        self._count = self._count + 1 if loss < LOWEST_LOSS or ratio > HIGHEST_RATIO else 0
        if self._count != STEPS:
            return None
        return (
            f"warning: loss={number(loss)}, ratio={number(ratio)}: for {STEPS} steps the loss was below "
            f"{LOWEST_LOSS:g} or the ratio above {HIGHEST_RATIO:g}, so updates are too large; lower policy.lr, add "
            "policy.warmup_steps, or check that clipping is on (loss.clip_low, loss.clip_high)"
        )
