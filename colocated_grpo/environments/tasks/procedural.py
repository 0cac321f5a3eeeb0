"""What procedural tasks and episodes share: endless questions in two disjoint splits, and credit by position."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from random import Random
from typing import Annotated, Any, Self

from pydantic import StringConstraints, model_validator

from colocated_grpo.config.base import Section
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


class Procedural(Section):
    """Questions drawn from one seeded stream. Of two settings min_x and max_x the first is not above the second."""

    template: Template
    """Prompt around the question."""

    def prompts(self, seed: int, split: Split) -> Iterator[dict[str, Any]]:
        rng = Random(seed)
        return split_items(iter(lambda: self._draw(rng), None), self.template, split)

    def _draw(self, rng: Random) -> dict[str, Any]:
        """An item, as `split_items` takes it."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        for low in type(self).model_fields:
            high = low.replace("min_", "max_", 1)
            if low.startswith("min_") and getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)} is above {high}={getattr(self, high)}")
        return self


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
