"""Sums, differences, products and exact quotients of integers."""

from __future__ import annotations

from random import Random
from typing import Literal

from pydantic import Field

from colocated_grpo.environments.base import Item
from colocated_grpo.environments.rewards.answers import final_answer
from colocated_grpo.environments.tasks.procedural import Procedural, Template


class Arithmetic(Procedural):
    """Reward 1 for the right integer, 0 otherwise."""

    min_digits: int = Field(1, ge=1)
    """Digits of the shortest operand."""
    max_digits: int = Field(3, ge=1, le=100)
    """Digits of the longest operand."""
    operators: list[Literal["+", "-", "*", "/"]] = Field(["+", "-"], min_length=1)
    """Drawn uniformly; "/" always divides without remainder."""
    template: Template = "What is {question}? Give the result between <answer> and </answer>."
    """Prompt text; {question} is replaced by the question."""

    def score(self, item: Item, completion: str) -> float:
        return float(normal_integer(final_answer(completion)) == normal_integer(item["answer"]))

    def _draw(self, rng: Random) -> Item:
        operator = rng.choice(self.operators)
        left, right = self._operand(rng), self._operand(rng)
        if operator == "/":
            right = max(right, 1)
            left, result = left * right, left
        else:
            result = {"+": left + right, "-": left - right, "*": left * right}[operator]
        return {"question": f"{left}{operator}{right}", "answer": str(result)}

    def _operand(self, rng: Random) -> int:
        digits = rng.randint(self.min_digits, self.max_digits)
        return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def normal_integer(text: str) -> str | None:
    """Return the canonical decimal form of an integer, or None. Sign, leading zeros and commas are normalized."""
    # Works on characters: int() of a million digits would hold the GIL and stall every thread.
    text = text.replace(",", "")
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not (digits.isascii() and digits.isdecimal()):
        return None
    digits = digits.lstrip("0") or "0"
    return f"-{digits}" if text[0] == "-" and digits != "0" else digits
