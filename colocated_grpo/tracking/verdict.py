"""The result of a run in one sentence: how far the reward has moved, against its noise, and groups without signal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from colocated_grpo.tracking.files import TRAIN, Row, first_and_last
from colocated_grpo.tracking.text import number

MIN_STEPS = 8
"""Fewer steps give no estimate of the noise."""
MAX_WINDOW = 20
"""Largest number of steps averaged at either end."""
CLEAR = 2.0
"""Changes above this many standard errors are called a change."""
MOSTLY = 0.5
"""Above this share of groups without signal the sentence says what to change."""


def verdict(rows: Sequence[Row]) -> str:
    """Return the sentence for the top of the report; '' without training steps."""
    train = [row for row in rows if row["kind"] == TRAIN]
    if not train:
        return ""
    parts = [_learning([row["reward"] for row in train if row.get("reward") is not None])]
    if (held_out := first_and_last(rows, "held_out/reward")) and held_out[0]["step"] < held_out[1]["step"]:
        before, after = (number(row["held_out/reward"]) for row in held_out)
        parts.append(f"held-out reward {before} -> {after}")
    if signal := _groups_without_signal(
        [row["groups/constant"] for row in train if row.get("groups/constant") is not None]
    ):
        parts.append(signal)
    return "; ".join(parts) + "."


def _learning(rewards: Sequence[float]) -> str:
    """Compare the means of the first and the last steps with the scatter from one step to the next."""
    if not rewards:
        return "No completion has a reward"
    if len(rewards) < MIN_STEPS:
        return f"{len(rewards)} step{'s' * (len(rewards) > 1)}: too few to tell learning from noise"
    window = max(2, min(MAX_WINDOW, len(rewards) // 4))
    before, after = _mean(rewards[:window]), _mean(rewards[-window:])
    # Differences of neighbours: unlike the standard deviation, their scatter does not count the trend as noise.
    variance = _mean([(b - a) ** 2 for a, b in pairwise(rewards)]) / 2
    error = math.sqrt(2 * variance / window)
    change = after - before
    if abs(change) <= CLEAR * error:
        how = "The training reward has not changed beyond its noise"
    else:
        how = f"The training reward has {'risen' if change > 0 else 'fallen'}"
    moved = f"{number(before)} -> {number(after)}, {change:+.3g} with a standard error of {error:.2g}"
    return f"{how} over {len(rewards)} steps: {moved} (means of {window} steps)"


def _groups_without_signal(shares: Sequence[float]) -> str:
    if not shares:
        return ""
    mean = _mean(shares)
    line = f"{mean:.0%} of the groups had no signal (equal rewards)"
    latest = _mean(shares[-max(1, min(MAX_WINDOW, len(shares) // 4)) :])
    if latest > MOSTLY:
        line += f", {latest:.0%} at the end: prompts of another difficulty would teach more"
    return line


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
