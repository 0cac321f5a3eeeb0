"""Write a string backwards."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from string import ascii_lowercase
from typing import Any

from pydantic import Field, model_validator

from colocated_grpo.config.base import Section
from colocated_grpo.environments.answers import final_answer
from colocated_grpo.environments.base import Split
from colocated_grpo.environments.tasks.procedural import Template, positional_reward, procedural_items


class Reversal(Section):
    """Reward 1 for the exact reversal; below 1/2 for a wrong one, by the share of right positions."""

    min_length: int = Field(3, ge=1)
    """Characters of the shortest string."""
    max_length: int = Field(8, ge=1)
    """Characters of the longest string."""
    alphabet: str = Field(ascii_lowercase, min_length=2)
    """Characters that strings are made of."""
    partial: bool = True
    """Give credit for right positions; False: 1 or 0."""
    template: Template = "reverse {question}"
    """Prompt around the string."""

    @model_validator(mode="after")
    def _lengths_in_order(self) -> Reversal:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length={self.min_length} is above max_length={self.max_length}")
        return self

    def prompts(self, seed: int, split: Split) -> Iterator[dict[str, Any]]:
        return procedural_items(self._draw, self.template, seed, split)

    def score(self, item: dict[str, Any], completion: str) -> float:
        return positional_reward(final_answer(completion), item["answer"], partial=self.partial)

    def _draw(self, rng: Random) -> dict[str, Any]:
        question = "".join(rng.choices(self.alphabet, k=rng.randint(self.min_length, self.max_length)))
        return {"question": question, "answer": question[::-1]}
