"""Base of procedural tasks and episodes: endless questions in two disjoint splits, and credit by position."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from random import Random
from typing import Annotated, Self

from pydantic import StringConstraints, model_validator

from colocated_grpo.environments.base import EnvironmentSetupError, Item, Split
from colocated_grpo.settings.base import Section

Template = Annotated[str, StringConstraints(pattern=r"\{question\}")]
"""Text that contains {question}. Without the placeholder every prompt would be the same."""
HELD_OUT_ONE_IN = 10
"""One in ten questions is held out."""
MAX_MISSES = 1000
"""Consecutive draws without a new question of the split, after which the split counts as exhausted."""
PARTIAL_CREDIT = 0.5
"""Upper bound of the reward of a wrong answer."""


def in_split(question: str, split: Split) -> bool:
    """Return whether the question belongs to the split.

    Decided by the question's hash alone, so that no run trains on a question that another run holds out.
    """
    digest = sha256(question.encode()).digest()
    held_out = int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0
    return held_out == (split == "held_out")


class Procedural(Section):
    """Questions drawn from one seeded generator. Each setting min_x must not exceed max_x."""

    template: Template
    """Prompt text; {question} is replaced by the question."""

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        rng = Random(seed)
        return split_items(iter(lambda: self._draw(rng), None), self.template, split)

    def _draw(self, rng: Random) -> Item:
        """Return an item as described at split_items()."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        for low in type(self).model_fields:
            high = low.replace("min_", "max_", 1)
            if low.startswith("min_") and getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)} is above {high}={getattr(self, high)}")
        return self


def split_items(drawn: Iterator[Item], template: str, split: Split) -> Iterator[Item]:
    """Yield the items of one split out of the endless `drawn`, with "prompt" made from the template and "question".

    "train" is endless and may repeat a question. "held_out" never repeats one, and ends when no new one is found. If
    the question alone does not identify an item, the item needs an "identity".
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
        elif (misses := misses + 1) == MAX_MISSES:
            break
    if split == "train":
        raise EnvironmentSetupError(
            f"the task's args allow too few questions: {MAX_MISSES} consecutive draws gave none to train on; widen them"
        )


def positional_reward(answer: str, expected: str, *, partial: bool) -> float:
    """Return 1 for an exact match, else 0 or, if `partial`, PARTIAL_CREDIT times the fraction of right characters."""
    if answer == expected:
        return 1.0
    if not partial:
        return 0.0
    hits = sum(given == wanted for given, wanted in zip(answer, expected, strict=False))
    return PARTIAL_CREDIT * hits / max(len(answer), len(expected))
