"""Completions of a megabyte that look for the slow paths of all that parses them: each costs well under a second.

A parser holds the GIL, so a slow one would stop the engine and every other thread of its rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from colocated_grpo.environments.adapters.textarena import MOVE, THOUGHTS
from colocated_grpo.environments.rewards.builtin import REWARDS
from colocated_grpo.environments.rewards.run_code import last_code_block
from colocated_grpo.environments.tasks.procedural import EXPRESSION
from colocated_grpo.environments.tasks.tool_use import MALFORMED, Call, read_call
from colocated_grpo.environments.town.legality import parse

SIZE = 1_000_000
SECONDS = 0.5
"""Linear parsers take a tenth of it at most; the quadratic ones took minutes."""
REPEATED = [
    "<search>", "<calc></search>", "<action>", "<action", "</action>", "<answer>", "<tool_call>", "<tool_call>{", "[",
    "[a", "<think>", "</think>", "<vote>", "<vote>a", "<vote ", "1,", "-1.", "####", "{", "a", " ",
    "```", "```python\n",
]  # fmt: skip
COLUMNS = {"answer": ["#### 7"], "tool_calls": ['{"name": "f", "arguments": {}}']}
PARSERS: dict[str, Callable[[str], object]] = {
    "tool use": read_call,
    "textarena moves": lambda text: MOVE.findall(THOUGHTS.sub("", text)),
    "town": lambda text: parse(f"<think></think>{text}"),
    "countdown": EXPRESSION.fullmatch,
    "run_code": last_code_block,
    **{
        name: lambda text, reward=reward: reward(completions=[text], **COLUMNS)
        for name, reward in REWARDS.items()
        if name != "math_verify"  # runs in a process with a time limit of its own
    },
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_hostile_completion_is_parsed_in_linear_time(name):
    for unit in REPEATED:
        text = unit * (SIZE // len(unit))
        # A garbage collection may be a part of one attempt.
        assert any(cpu_seconds(PARSERS[name], text) < SECONDS for _ in range(3)), unit


def cpu_seconds(parse: Callable[[str], object], text: str) -> float:
    since = time.process_time()
    parse(text)
    return time.process_time() - since


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("<calc>1+1</calc>", Call("calc", "1+1")),
        ("<search><calc>1</calc>", Call("calc", "1")),
        ("<calc><calc>1</calc>", Call("calc", "<calc>1")),
        ("<calc>1\n2</calc></calc>", Call("calc", "1\n2")),
        ("</calc><calc>", MALFORMED),
        ("<calc>1</calc><search>a</search>", MALFORMED),
        ("<answer><calc>1</calc></answer>", Call("answer", "<calc>1</calc>")),
    ],
)
def test_a_call_is_the_first_element_that_is_closed(text, call):
    assert read_call(text) == call
