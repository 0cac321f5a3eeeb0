"""Reach a target from given numbers with + - * / and parentheses."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from random import Random

from pydantic import Field

from colocated_grpo.environments.base import Item
from colocated_grpo.environments.rewards.answers import final_answer
from colocated_grpo.environments.tasks.procedural import Procedural, Template

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
EXPRESSION = re.compile(r"[\d+\-*/() ]{1,200}", re.ASCII)
"""The length limit bounds all later costs: digits of a number, depth of the tree, size of a product."""


class Countdown(Procedural):
    """Reward 1 for an expression that uses every number once and equals the target."""

    min_numbers: int = Field(3, ge=2)
    """Minimum count of numbers given."""
    max_numbers: int = Field(4, ge=2, le=8)
    """Maximum count of numbers given."""
    max_number: int = Field(99, ge=2)
    """Largest number given."""
    max_target: int = Field(999, ge=2)
    """Largest target."""
    format_reward: float = Field(0.1, ge=0, lt=1)
    """Reward of an expression that uses every number once and misses the target."""
    template: Template = (
        "{question}. Use each number exactly once, with + - * / and parentheses. "
        "Give only the expression between <answer> and </answer>."
    )
    """Prompt text; {question} is replaced by the question."""

    def score(self, item: Item, completion: str) -> dict[str, float]:
        # Models often append "= 24"; the expression before it is the answer.
        expression = final_answer(completion).partition("=")[0].strip()
        value, used = evaluate(expression)
        if value is None or sorted(used) != sorted(item["numbers"]):
            return {"reward": 0.0, "format": 0.0}
        return {"reward": 1.0 if value == item["target"] else self.format_reward, "format": 1.0}

    def _draw(self, rng: Random) -> Item:
        while True:
            count = rng.randint(self.min_numbers, self.max_numbers)
            numbers = [rng.randint(1, self.max_number) for _ in range(count)]
            expression, target = _random_solution(rng, numbers)
            if 1 <= target <= self.max_target:
                question = f"Make {target} from {', '.join(map(str, numbers))}"
                return {"question": question, "answer": expression, "numbers": numbers, "target": target}


def _random_solution(rng: Random, numbers: list[int]) -> tuple[str, int]:
    """Combine random pairs of operands until one is left. Every intermediate value is an integer."""
    operands = [(str(number), number) for number in numbers]
    while len(operands) > 1:
        rng.shuffle(operands)
        (left_text, left), (right_text, right) = operands.pop(), operands.pop()
        symbols = "+-*/" if right and left % right == 0 else "+-*"
        symbol = rng.choice(symbols)
        value = {"+": left + right, "-": left - right, "*": left * right, "/": left // (right or 1)}[symbol]
        operands.append((f"({left_text}{symbol}{right_text})", value))
    expression, value = operands[0]
    return expression[1:-1], value


def evaluate(expression: str) -> tuple[Fraction | None, list[int]]:
    """Return the exact value and the numbers used, or (None, []) if malformed. No code is executed."""
    if EXPRESSION.fullmatch(expression) is None:
        return None, []
    used: list[int] = []
    try:
        return _value(ast.parse(expression, mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None, []


def _value(node: ast.expr, used: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            used.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left, used), _value(right, used))
    raise ValueError(f"{type(node).__name__} is not allowed in an answer")
