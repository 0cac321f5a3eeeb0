"""Questions that need a calculator and a search, one tool call per turn. Easy enough for a 1M-parameter model."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Literal, NamedTuple

from pydantic import Field

from colocated_grpo.environments.base import Item
from colocated_grpo.environments.chat import ContextExhausted, Conversation
from colocated_grpo.environments.rewards.builtin import without_thoughts
from colocated_grpo.environments.tasks.procedural import OPERATORS, Procedural, Template, normal_integer

EXPRESSION = re.compile(r"\s*(-?\d{1,9})\s*(?:([-+*])\s*(-?\d{1,9})\s*)?")


class ToolError(ValueError):
    """A bad call. The message is shown to the model."""


def calculate(expression: str) -> str:
    """Return a whole number, or the sum, difference or product of two."""
    if (found := EXPRESSION.fullmatch(expression)) is None:
        raise ToolError("write two whole numbers, with + - or * between them")
    return str(OPERATORS[found[2]](int(found[1]), int(found[3])) if found[2] else int(found[1]))


def search(text: str, name: str) -> str:
    """Return the line of a name."""
    for line in text.splitlines():
        if line.partition(":")[0] == name.strip().lower():
            return line
    raise ToolError("nothing found")


NAMES = ("ann", "bob", "cat", "dan", "eve", "fay", "gus", "hal", "ivy", "jon", "kim", "leo")
NAME = re.compile(r"[a-z]+")
OPENING = re.compile(r"<(search|calc|answer)>")
CLOSING = {"search": "</search>", "calc": "</calc>", "answer": "</answer>"}
ANSWER = "answer"


class Call(NamedTuple):
    """A tool call or the answer. Example: Call("calc", "3*4")"""

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
        "<calc>3*4</calc> calculates. Give the result between <answer> and </answer>."
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

    def teach(self, item: Item, turn: int) -> str:
        """Return the correct message of a turn, counted from 0, as supervision for a warm start."""
        names = item["names"]
        if turn < len(names):
            return f"<search>{names[turn]}</search>"
        if turn == len(names) and item["question"] not in names:
            value_of = dict(line.split(": ") for line in item["text"].splitlines())
            return f"<calc>{NAME.sub(lambda name: value_of[name[0]], item['question'])}</calc>"
        return f"<answer>{item['answer']}</answer>"

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
    text = without_thoughts(text)
    last = {name: text.rfind(closing) for name, closing in CLOSING.items()}
    calls: list[Call] = []
    position = 0
    # Not one expression for the whole element: its time is quadratic in a run of opening tags that are not closed.
    while len(calls) < 2 and (opening := OPENING.search(text, position)):
        position, name = opening.end(), opening[1]
        if position <= last[name]:
            end = text.index(CLOSING[name], position)
            calls.append(Call(name, text[position:end]))
            position = end + len(CLOSING[name])
    return calls[0] if len(calls) == 1 else MALFORMED


def tool_result(tools: Mapping[str, Callable[[str], str]], call: Call) -> str:
    """Return the tool's result, or an error line for the model."""
    if call == MALFORMED:
        return "error: make one call in each turn"
    try:
        return tools[call.name](call.argument)
    except ToolError as error:
        return f"error: {error}"
