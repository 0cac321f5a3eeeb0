"""Write a string backwards."""

from __future__ import annotations

from random import Random
from string import ascii_lowercase

from pydantic import Field

from colocated_grpo.environments.base import Item
from colocated_grpo.environments.rewards.answers import final_answer
from colocated_grpo.environments.tasks.procedural import Procedural, Template, positional_reward


class Reversal(Procedural):
    """Reward 1 for the exact reversal; below 1/2 for a wrong one, by the fraction of right positions."""

    min_length: int = Field(3, ge=1)
    """Characters of the shortest string."""
    max_length: int = Field(8, ge=1)
    """Characters of the longest string."""
    alphabet: str = Field(ascii_lowercase, min_length=2)
    """Characters to draw from."""
    partial: bool = True
    """Give partial credit for right positions; False: reward 1 or 0."""
    template: Template = "reverse {question}"
    """Prompt text; {question} is replaced by the string."""

    def score(self, item: Item, completion: str) -> float:
        return positional_reward(final_answer(completion), item["answer"], partial=self.partial)

    def _draw(self, rng: Random) -> Item:
        question = "".join(rng.choices(self.alphabet, k=rng.randint(self.min_length, self.max_length)))
        return {"question": question, "answer": question[::-1]}
