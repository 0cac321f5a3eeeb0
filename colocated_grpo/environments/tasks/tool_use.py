"""Questions that need a calculator and a search, one tool call per turn. Easy enough for a 1M-parameter model."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from itertools import islice
from random import Random
from typing import Literal, NamedTuple

from pydantic import Field

from colocated_grpo.environments.base import Item
from colocated_grpo.environments.chat import ContextExhausted, Conversation
from colocated_grpo.environments.rewards.answers import last_number, tagged_parts, without_thoughts
from colocated_grpo.environments.tasks.procedural import ARITHMETIC, Procedural, Template, normal_integer

MAX_EXPRESSION_LENGTH = 200
MAX_BITS = 256
"""Bits of the largest numerator or denominator. Bounds the digits of results and the cost of operations."""
MAX_EXPONENT = 64
MAX_RESULTS = 3
"""Lines that a search returns."""
WORD = re.compile(r"\w+")

OPERATORS = {
    **ARITHMETIC,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


class ToolError(ValueError):
    """A bad call. The message is shown to the model."""


def calculate(expression: str) -> str:
    """Evaluate numbers, + - * / // % ** and parentheses exactly. Non-integer results have six significant digits."""
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ToolError(f"more than {MAX_EXPRESSION_LENGTH} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ToolError:
        raise
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("not an expression") from None
    return str(value) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=number) if type(number) in (int, float):
            value = Fraction(repr(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            value = _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ToolError("only numbers, + - * / // % ** and parentheses")
    return _bounded(value)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ToolError(f"an exponent must be a whole number of at most {MAX_EXPONENT}")
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("the number is too large")
    return value


def search(text: str, query: str) -> str:
    """Return up to MAX_RESULTS lines, those with most query words first, ties in text order. Case is ignored."""
    wanted = set(WORD.findall(query.lower()))
    lines = text.splitlines()
    hits = {number: len(wanted & set(WORD.findall(line.lower()))) for number, line in enumerate(lines)}
    found = sorted((number for number in hits if hits[number]), key=lambda number: -hits[number])
    if not found:
        raise ToolError("nothing found")
    return "\n".join(lines[number] for number in found[:MAX_RESULTS])


NAMES = ("ann", "bob", "cat", "dan", "eve", "fay", "gus", "hal", "ivy", "jon", "kim", "leo")
NAME = re.compile(r"[a-z]+")
OPENING = re.compile(r"<(search|calc|answer)>")
ANSWER = "answer"


class Call(NamedTuple):
    """A tool call or the answer. Example: Call("calc", "2*(3+4)")"""

    name: str
    argument: str


MALFORMED = Call("", "")


class ToolUse(Procedural):
    """Reward 1 for the right number, 0 without an answer.

    A wrong answer gets `format_reward` times the fraction of well-formed turns. Names stand for numbers that must be
    searched: "ann+bob" takes two searches, a calculation and the answer.
    """

    min_calls: int = Field(1, ge=1, le=3)
    """Tool calls of the easiest question."""
    max_calls: int = Field(3, ge=1, le=3)
    """Tool calls of the hardest question."""
    names: int = Field(4, ge=2, le=len(NAMES))
    """Names in the searched text, one per line."""
    max_number: int = Field(99, ge=1)
    """Largest number in the text and the question."""
    operators: list[Literal["+", "-", "*"]] = Field(["+", "-"], min_length=1)
    """Operators, drawn uniformly."""
    max_turns: int = Field(6, ge=2)
    """Maximum assistant messages in an episode, including the answer."""
    max_turn_tokens: int = Field(256, ge=1)
    """Token limit of one assistant message."""
    format_reward: float = Field(0.1, ge=0, lt=1)
    """Reward of a wrong answer if every turn made exactly one call."""
    role: Literal["user", "tool"] = "user"
    """Role of the messages with tool results. 'tool' needs a chat template that supports this role."""
    template: Template = (
        "Find {question}. Each name stands for a number. Use one tool a turn: <search>name</search> looks a name up, "
        "<calc>2*(3+4)</calc> calculates. Give the result between <answer> and </answer>."
    )
    """Prompt text; {question} is replaced by the question."""

    async def run(self, item: Item, model: Conversation) -> dict[str, float]:
        tools = {"search": partial(search, item["text"]), "calc": calculate}
        calls: list[Call] = []
        with suppress(ContextExhausted):
            while True:
                message = await model.generate(self.max_turn_tokens)
                calls.append(read_call(message.text))
                if calls[-1].name == ANSWER or len(calls) == self.max_turns:
                    break
                model.observe([{"role": self.role, "content": tool_result(tools, calls[-1])}])
        return self._score(calls, item)

    def teach(self, item: Item, observations: Sequence[str]) -> str:
        """Return the correct message that follows `observations`, as supervision for a warm start."""
        names, step = item["names"], len(observations)
        if step < len(names):
            return f"<search>{names[step]}</search>"
        if step == len(names) and item["question"] not in names:
            numbers = [_number(observation) for observation in observations]
            value_of = dict(zip(names, numbers, strict=True))
            return f"<calc>{NAME.sub(lambda name: value_of[name[0]], item['question'])}</calc>"
        return f"<answer>{_number(observations[-1])}</answer>"

    def _score(self, calls: Sequence[Call], item: Item) -> dict[str, float]:
        answered = bool(calls) and calls[-1].name == ANSWER
        correct = answered and normal_integer(calls[-1].argument.strip()) == item["answer"]
        well_formed = sum(call != MALFORMED for call in calls) / max(len(calls), 1)
        return {
            "reward": 1.0 if correct else self.format_reward * well_formed * answered,
            "correct": float(correct),
            "answered": float(answered),
            "format": well_formed,
        }

    def _draw(self, rng: Random) -> Item:
        value_of = {name: rng.randint(0, self.max_number) for name in rng.sample(NAMES, self.names)}
        one, other = rng.sample(list(value_of), 2)
        number, operation = rng.randint(0, self.max_number), rng.choice(self.operators)
        questions = {
            1: [one, f"{rng.randint(0, self.max_number)}{operation}{number}"],
            2: [f"{one}{operation}{number}"],
            3: [f"{one}{operation}{other}"],
        }
        question = rng.choice(questions[rng.randint(self.min_calls, self.max_calls)])
        text = "\n".join(f"{name}: {value}" for name, value in value_of.items())
        return {
            "question": question,
            "identity": f"{question}\n{text}",
            "text": text,
            "names": NAME.findall(question),
            "answer": calculate(NAME.sub(lambda name: str(value_of[name[0]]), question)),
        }


def read_call(text: str) -> Call:
    """Return the call of a message, ignoring its thoughts; MALFORMED if the message has no call or several."""
    found = list(islice(tagged_parts(without_thoughts(text), OPENING), 2))
    return Call(*found[0]) if len(found) == 1 else MALFORMED


def _number(observation: str) -> str:
    number = last_number(observation)
    assert number is not None, "right calls return numbers"
    return number


def tool_result(tools: Mapping[str, Callable[[str], str]], call: Call) -> str:
    """Return the tool's result, or an error line for the model."""
    if call == MALFORMED:
        return "error: make one call in each turn"
    try:
        return tools[call.name](call.argument)
    except ToolError as error:
        return f"error: {error}"
