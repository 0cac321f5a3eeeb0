"""A task as a scorer: runs the task's own judge and keeps its failures to the completion that caused them."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Sequence
from functools import cache
from inspect import isawaitable
from typing import Any

from colocated_grpo.environments.base import Task
from colocated_grpo.environments.user_code import one_line
from colocated_grpo.types import Completion, Prompt, Score


class TaskScorer:
    """Scores each completion by itself with task.score."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        return [score_text(self.task, prompt.item, text) for text in texts]


def score_text(task: Task, item: dict[str, Any], text: str) -> Score:
    """What the task says of one completion; never raises."""
    try:
        return as_score(settle(task.score(item, text)))
    except (Exception, SystemExit) as error:
        return Score(reward=None, error=one_line(error))


def as_score(result: Any) -> Score:
    """From a number, None or named parts. Parts without "reward" raise: no sum is guessed."""
    if not isinstance(result, dict):
        return Score(reward=as_number(result))
    parts = {name: number for name, value in result.items() if (number := as_number(value)) is not None}
    if "reward" not in result:
        raise ValueError(f"score() gave parts without 'reward': {', '.join(map(str, result)) or 'none'}")
    return Score(reward=parts.pop("reward", None), parts=parts)


def as_number(value: Any) -> float | None:
    """A finite float. None and NaN are None (TRL's "not applicable"); anything else raises."""
    if value is None:
        return None
    if isinstance(value, str) or math.isinf(number := float(value)):
        raise ValueError(f"a reward must be a finite number or None, got {value!r}")
    return None if math.isnan(number) else number


def settle(result: Any) -> Any:
    """The result itself, or what it gives when awaited."""
    if not isawaitable(result):
        return result
    return asyncio.run_coroutine_threadsafe(_value(result), _event_loop()).result()


async def _value(result: Awaitable[Any]) -> Any:
    return await result


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the whole process: HTTP clients of user code belong to the loop that first used them."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async-rewards", daemon=True).start()
    return loop
