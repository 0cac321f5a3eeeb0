"""Questions that take a calculator and a search, one tool a turn: small enough for a model of a million parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, Literal, NamedTuple

from pydantic import Field

from colocated_grpo.environments.conversation import Conversation, OutOfRoom
from colocated_grpo.environments.episodes.toolbox import ToolError, calculate, search
from colocated_grpo.environments.rewards.answers import last_number, without_thoughts
from colocated_grpo.environments.tasks.arithmetic import normal_integer
from colocated_grpo.environments.tasks.procedural import Procedural, Template

NAMES = ("ann", "bob", "cat", "dan", "eve", "fay", "gus", "hal", "ivy", "jon", "kim", "leo")
NAME = re.compile(r"[a-z]+")
CALL = re.compile(r"<(search|calc|answer)>(.*?)</\1>", re.DOTALL)
ANSWER = "answer"


class Call(NamedTuple):
    """Example: Call("calc", "2*(3+4)")"""

    name: str
    argument: str


MALFORMED = Call("", "")


class ToolUse(Procedural):
    """Reward 1 for the right number; `format_reward` times the share of well-formed turns for a wrong one.

    Names stand for numbers that only a search finds: "ann+bob" takes two searches, a calculation and the answer.
    """

    min_calls: int = Field(1, ge=1, le=3)
    """Tool calls that the easiest question takes."""
    max_calls: int = Field(3, ge=1, le=3)
    """Tool calls that the hardest question takes."""
    names: int = Field(4, ge=2, le=len(NAMES))
    """Lines of the text that is searched."""
    max_number: int = Field(99, ge=1)
    """Largest number in texts and questions."""
    operators: list[Literal["+", "-", "*"]] = Field(["+", "-"], min_length=1)
    """Drawn from evenly."""
    max_turns: int = Field(6, ge=2)
    """Turns of the policy, the answer included."""
    max_turn_tokens: int = Field(256, ge=1)
    """Longest turn of the policy."""
    format_reward: float = Field(0.1, ge=0, lt=1)
    """Reward of a wrong answer in turns that each make one call."""
    role: Literal["user", "tool"] = "user"
    """Role of the tools' messages; 'tool' where the chat template knows it."""
    template: Template = (
        "Find {question}. Each name stands for a number. Use one tool a turn: <search>name</search> looks a name up, "
        "<calc>2*(3+4)</calc> calculates. Give the result between <answer> and </answer>."
    )
    """Prompt around the question."""

    async def run(self, item: dict[str, Any], model: Conversation) -> dict[str, float]:
        tools = {"search": partial(search, item["text"]), "calc": calculate}
        calls: list[Call] = []
        with suppress(OutOfRoom):
            while True:
                turn = await model.generate(self.max_turn_tokens)
                calls.append(read_call(turn.text))
                if calls[-1].name == ANSWER or len(calls) == self.max_turns:
                    break
                model.observe([{"role": self.role, "content": answer_of(tools, calls[-1])}])
        return self._score(calls, item)

    def teach(self, item: dict[str, Any], observations: Sequence[str]) -> str:
        """The right next turn after these observations; what a warm start learns from."""
        names, step = item["names"], len(observations)
        if step < len(names):
            return f"<search>{names[step]}</search>"
        if step == len(names) and item["question"] not in names:
            found = dict(zip(names, map(last_number, observations), strict=True))
            return f"<calc>{NAME.sub(lambda name: found[name[0]], item['question'])}</calc>"
        return f"<answer>{last_number(observations[-1])}</answer>"

    def _score(self, calls: Sequence[Call], item: dict[str, Any]) -> dict[str, float]:
        answered = bool(calls) and calls[-1].name == ANSWER
        correct = answered and normal_integer(calls[-1].argument.strip()) == item["answer"]
        well_formed = sum(call != MALFORMED for call in calls) / max(len(calls), 1)
        return {
            "reward": 1.0 if correct else self.format_reward * well_formed * answered,
            "correct": float(correct),
            "answered": float(answered),
            "format": well_formed,
        }

    def _draw(self, rng: Random) -> dict[str, Any]:
        known = {name: rng.randint(0, self.max_number) for name in rng.sample(NAMES, self.names)}
        one, other = rng.sample(list(known), 2)
        number, operation = rng.randint(0, self.max_number), rng.choice(self.operators)
        questions = {
            1: [one, f"{rng.randint(0, self.max_number)}{operation}{number}"],
            2: [f"{one}{operation}{number}"],
            3: [f"{one}{operation}{other}"],
        }
        question = rng.choice(questions[rng.randint(self.min_calls, self.max_calls)])
        text = "\n".join(f"{name}: {value}" for name, value in known.items())
        return {
            "question": question,
            "identity": f"{question}\n{text}",
            "text": text,
            "names": NAME.findall(question),
            "answer": calculate(NAME.sub(lambda name: str(known[name[0]]), question)),
        }


def read_call(text: str) -> Call:
    """The one call of a turn, thoughts left out; MALFORMED for none or several."""
    found = CALL.findall(without_thoughts(text))
    return Call(*found[0]) if len(found) == 1 else MALFORMED


def answer_of(tools: Mapping[str, Callable[[str], str]], call: Call) -> str:
    """What the tool says, or what is wrong with the call."""
    if call == MALFORMED:
        return "error: make one call in each turn"
    try:
        return tools[call.name](call.argument)
    except ToolError as error:
        return f"error: {error}"
