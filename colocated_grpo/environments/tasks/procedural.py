"""What the procedural tasks share: endless questions in two disjoint splits, and credit by position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from random import Random
from typing import Annotated, Any

from pydantic import StringConstraints

from colocated_grpo.environments.base import EnvironmentSetupError, Split

Template = Annotated[str, StringConstraints(pattern=r"\{question\}")]
"""Text around {question}; without that slot every prompt would be the same."""
HELD_OUT_ONE_IN = 10
PATIENCE = 1000
"""Draws in a row that give nothing for a split before its questions count as used up."""
PARTIAL_CREDIT = 0.5
"""Upper bound of the reward of a wrong answer."""


def in_split(question: str, split: Split) -> bool:
    """The question's hash decides, whatever the seed: no run ever trains on what another holds out."""
    digest = sha256(question.encode()).digest()
    held_out = int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0
    return held_out == (split == "held_out")


def procedural_items(
    draw: Callable[[Random], dict[str, Any]], template: str, seed: int, split: Split
) -> Iterator[dict[str, Any]]:
    """Items drawn from one seeded stream; see split_items."""
    rng = Random(seed)
    return split_items(iter(lambda: draw(rng), None), template, split)


def split_items(drawn: Iterator[dict[str, Any]], template: str, split: Split) -> Iterator[dict[str, Any]]:
    """The endless items of `drawn` that belong to the split, their "question" put into the template as "prompt".

    train is endless and may repeat a question; held_out never repeats one and ends when no new one turns up. Where the
    question is not all there is to an item, its "identity" decides what is the same.
    """
    seen: set[str] = set()
    misses = 0
    for item in drawn:
        identity = item.get("identity", item["question"])
        if in_split(identity, split) and identity not in seen:
            misses = 0
            if split == "held_out":
                seen.add(identity)
            yield {**item, "prompt": template.replace("{question}", item["question"])}
        elif (misses := misses + 1) == PATIENCE:
            break
    if split == "train":
        raise EnvironmentSetupError(f"the task's args allow too few questions: {PATIENCE} draws gave none to train on")


def positional_reward(answer: str, expected: str, *, partial: bool) -> float:
    """1 for an exact match; otherwise 0, or with `partial` the share of right characters times PARTIAL_CREDIT."""
    if answer == expected:
        return 1.0
    if not partial:
        return 0.0
    hits = sum(given == wanted for given, wanted in zip(answer, expected, strict=False))
    return PARTIAL_CREDIT * hits / max(len(answer), len(expected))
