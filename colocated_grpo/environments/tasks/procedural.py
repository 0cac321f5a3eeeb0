"""Procedural tasks: endless questions in two disjoint splits, built in and from the reasoning-gym package."""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from hashlib import sha256
from itertools import count
from random import Random
from string import ascii_lowercase, digits
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from colocated_grpo.environments.base import AnswerError, EnvironmentSetupError, Item, Split
from colocated_grpo.environments.rewards.builtin import PARTIAL_CREDIT, final_answer
from colocated_grpo.environments.user_code.loading import import_optional, one_line, unknown_name
from colocated_grpo.settings.base import Section
from colocated_grpo.types import JsonObject

Template = Annotated[str, StringConstraints(pattern=r"\{question\}")]
"""Text that contains {question}. Without the placeholder every prompt would be the same."""
HELD_OUT_ONE_IN = 10
MAX_MISSES = 1000
"""Consecutive draws without a new question of the split, after which the split counts as exhausted."""
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


class Procedural(Section):
    """Questions drawn from one seeded generator. Each setting min_x must not exceed max_x."""

    template: Template
    """Prompt text; {question} is replaced by the question."""

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        rng = Random(seed)
        return split_items(iter(lambda: self._draw(rng), None), self.template, split)

    def _draw(self, rng: Random) -> Item:
        """Return an item with the keys that split_items() reads."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        for low in type(self).model_fields:
            high = low.replace("min_", "max_", 1)
            if low.startswith("min_") and getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)} is above {high}={getattr(self, high)}")
        return self


def split_items(drawn: Iterator[Item], template: str, split: Split) -> Iterator[Item]:
    """Yield the items of one split of the endless `drawn`, with "prompt" made from the template and "question".

    "train" is endless and may repeat a question. "held_out" repeats none, and ends after MAX_MISSES draws without a new
    one. "identity" tells items with the same question apart.
    """
    seen: set[str] = set()
    misses = 0
    for item in drawn:
        identity = item.get("identity", item["question"])
        # The hash alone decides, so no run trains on a question that another run holds out.
        number = int.from_bytes(sha256(identity.encode()).digest()[:8], "big")
        if (number % HELD_OUT_ONE_IN == 0) == (split == "held_out") and identity not in seen:
            misses = 0
            if split == "held_out":
                seen.add(identity)
            yield {**item, "prompt": template.replace("{question}", item["question"])}
        elif (misses := misses + 1) == MAX_MISSES:
            break
    if split == "train":
        problem = f"{MAX_MISSES} consecutive draws gave none to train on; widen them"
        raise EnvironmentSetupError(f"the task's args allow too few questions: {problem}")


class Positional(Procedural):
    """Reward 1 for the exact answer; below 1/2 for a wrong answer, by the fraction of right positions."""

    partial: bool = True
    """Give partial credit for right positions; False: reward 1 or 0."""

    def score(self, item: Item, completion: str) -> float:
        answer, expected = final_answer(completion), item["answer"]
        if answer == expected:
            return 1.0
        hits = sum(given == wanted for given, wanted in zip(answer, expected, strict=False))
        return self.partial * PARTIAL_CREDIT * hits / max(len(answer), len(expected))


class Sorting(Positional):
    """Digits to be sorted: easy enough for the quickstart's 1M-parameter model."""

    min_digits: int = Field(4, ge=1)
    """Digits of the shortest question."""
    max_digits: int = Field(8, ge=1)
    """Digits of the longest question."""
    template: Template = "sort {question}"
    """Prompt text; {question} is replaced by the digits."""

    def _draw(self, rng: Random) -> Item:
        question = "".join(rng.choices(digits, k=rng.randint(self.min_digits, self.max_digits)))
        return {"question": question, "answer": "".join(sorted(question))}


class Reversal(Positional):
    """Strings to be written backwards."""

    min_length: int = Field(3, ge=1)
    """Characters of the shortest string."""
    max_length: int = Field(8, ge=1)
    """Characters of the longest string."""
    alphabet: str = Field(ascii_lowercase, min_length=2)
    """Characters to draw from."""
    template: Template = "reverse {question}"
    """Prompt text; {question} is replaced by the string."""

    def _draw(self, rng: Random) -> Item:
        question = "".join(rng.choices(self.alphabet, k=rng.randint(self.min_length, self.max_length)))
        return {"question": question, "answer": question[::-1]}


class Arithmetic(Procedural):
    """Reward 1 for the right integer, 0 otherwise."""

    min_digits: int = Field(1, ge=1)
    """Digits of the shortest operand."""
    max_digits: int = Field(3, ge=1, le=100)
    """Digits of the longest operand."""
    operators: list[Literal["+", "-", "*", "/"]] = Field(["+", "-"], min_length=1)
    """Operators, drawn uniformly. "/" always divides without remainder."""
    template: Template = "What is {question}? Give the result between <answer> and </answer>."
    """Prompt text; {question} is replaced by the question."""

    def score(self, item: Item, completion: str) -> float:
        return float(normal_integer(final_answer(completion)) == normal_integer(item["answer"]))

    def _draw(self, rng: Random) -> Item:
        symbol = rng.choice(self.operators)
        left, right = self._operand(rng), self._operand(rng)
        if symbol == "/":
            right = max(right, 1)
            left *= right
        return {"question": f"{left}{symbol}{right}", "answer": str(OPERATORS[symbol](left, right))}

    def _operand(self, rng: Random) -> int:
        digits = rng.randint(self.min_digits, self.max_digits)
        return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def normal_integer(text: str) -> str | None:
    """Return an integer in canonical form, without plus sign, leading zeros and commas; None for other text."""
    # Works on characters: int() of a million digits would hold the GIL and stall every thread.
    text = text.replace(",", "")
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not (digits.isascii() and digits.isdecimal()):
        return None
    digits = digits.lstrip("0") or "0"
    return f"-{digits}" if text[0] == "-" and digits != "0" else digits


ARITHMETIC: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
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
    """Minimum count of numbers in a question, without the target."""
    max_numbers: int = Field(4, ge=2, le=8)
    """Maximum count of numbers in a question, without the target."""
    max_number: int = Field(99, ge=2)
    """Largest number in a question, except for the target."""
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
    """Return a random expression of all numbers, with integers as intermediate values, and its value."""
    operands = [(str(number), number) for number in numbers]
    while len(operands) > 1:
        rng.shuffle(operands)
        (left_text, left), (right_text, right) = operands.pop(), operands.pop()
        symbol = rng.choice("+-*/" if right and left % right == 0 else "+-*")
        operands.append((f"({left_text}{symbol}{right_text})", OPERATORS[symbol](left, right)))
    expression, value = operands[0]
    return expression[1:-1], value


def evaluate(expression: str) -> tuple[Fraction | None, list[int]]:
    """Return the exact value of the expression and its numbers, or (None, []) if malformed. Executes no code."""
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
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            return ARITHMETIC[type(op)](_value(left, used), _value(right, used))
    raise ValueError(f"{type(node).__name__} is not allowed in an answer")


CHUNK = 500
"""Questions per reasoning-gym dataset object. The number is limited because some generators prepare or store all
questions of an object at once."""


class ReasoningGym:
    """One reasoning-gym dataset. Args: the fields of its config, and `instruction`, which ends each prompt."""

    def __init__(
        self, dataset: str, *, instruction: str = "Give the final answer between <answer> and </answer>.", **args: Any
    ) -> None:
        for reserved in {"seed", "size"} & args.keys():
            raise EnvironmentSetupError(f"reasoning_gym:{dataset}: args.{reserved} is set by the run; remove it")
        factory = import_optional("reasoning_gym.factory", "reasoning-gym", f"reasoning_gym:{dataset}")
        if dataset not in factory.DATASETS:
            raise unknown_name("environments", "reasoning_gym dataset", dataset, factory.DATASETS)
        self.dataset = dataset
        self.template = "{question}\n" + instruction if instruction else "{question}"
        self.args = args
        self.judge = self._chunk(seed=0)

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        return split_items(self._entries(seed), self.template, split)

    def score(self, item: Item, completion: str) -> float:
        """Return the dataset's own score. Raises AnswerError if this answer, but not the item's own, makes it fail."""
        try:
            return float(self.judge.score_answer(final_answer(completion), item))
        except Exception as error:
            self.judge.score_answer(item["answer"], item)  # raises if the scorer itself is broken
            raise AnswerError(one_line(error)) from error

    def _entries(self, seed: int) -> Iterator[Item]:
        for number in count():
            # A hashed seed: generators seed question i with seed + i, so adjacent seeds would repeat questions.
            digest = sha256(f"{seed}:{number}".encode()).digest()
            dataset = self._chunk(int.from_bytes(digest[:4], "big"))
            yield from (dataset[index] for index in range(CHUNK))

    def _chunk(self, seed: int) -> Any:
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import create_dataset

        args = dict(self.args)
        if self.dataset == "composite":
            defaults: JsonObject = {"weight": 1.0, "config": {}}
            args["datasets"] = [DatasetSpec(**{**defaults, **spec}) for spec in args.get("datasets", [])]
        return create_dataset(self.dataset, seed=seed, size=CHUNK, **args)
