"""Sort digits: easy enough for the quickstart's 1M-parameter model."""

from __future__ import annotations

from random import Random
from string import digits

from pydantic import Field

from colocated_grpo.environments.base import Item
from colocated_grpo.environments.rewards.answers import final_answer
from colocated_grpo.environments.tasks.procedural import Procedural, Template, positional_reward


class Sorting(Procedural):
    """Reward 1 for the sorted digits; below 1/2 for a wrong answer, by the fraction of right positions."""

    min_digits: int = Field(4, ge=1)
    """Digits of the shortest question."""
    max_digits: int = Field(8, ge=1)
    """Digits of the longest question."""
    partial: bool = True
    """Give partial credit for right positions; False: reward 1 or 0."""
    template: Template = "sort {question}"
    """Prompt text; {question} is replaced by the digits."""

    def score(self, item: Item, completion: str) -> float:
        return positional_reward(final_answer(completion), item["answer"], partial=self.partial)

    def _draw(self, rng: Random) -> Item:
        question = "".join(rng.choices(digits, k=rng.randint(self.min_digits, self.max_digits)))
        return {"question": question, "answer": "".join(sorted(question))}
