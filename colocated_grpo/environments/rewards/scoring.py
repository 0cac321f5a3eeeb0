"""A task as a scorer: runs the task's own judge and keeps its failures to the completion that caused them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from inspect import isawaitable
from typing import Any

from colocated_grpo.environments.base import Task
from colocated_grpo.environments.user_code.event_loops import SharedLoop
from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.types import Completion, Prompt, Score

AWAITED = SharedLoop("async-rewards")
"""Where the process awaits what rewards and judges return."""
LARGEST = 1e30
"""Of a reward: sums, squares and weighted sums of larger ones leave the range of a float."""


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
    except BaseException as error:  # what time limits for threads raise is no Exception: user code must not catch it
        return Score(reward=None, error=one_line(error))


def as_score(result: Any) -> Score:
    """From a number, None or named parts. Parts without "reward" raise: no sum is guessed."""
    if not isinstance(result, dict):
        return Score(reward=as_number(result))
    parts = {str(name): number for name, value in result.items() if (number := as_number(value)) is not None}
    if "reward" not in result:
        raise ValueError(f"score() gave parts without 'reward': {', '.join(map(str, result)) or 'none'}")
    return Score(reward=parts.pop("reward", None), parts=parts)


def as_number(value: Any) -> float | None:
    """A finite float. None and NaN are None (TRL's "not applicable"); anything else raises."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or abs(number := float(value)) > LARGEST:
        raise ValueError(f"a reward must be None or a number up to {LARGEST:g} in size, got {value!r}")
    return None if math.isnan(number) else number


def settle(result: Any) -> Any:
    """The result itself, or what it gives when awaited."""
    if not isawaitable(result):
        return result
    return asyncio.run_coroutine_threadsafe(_value(result), AWAITED.get()).result()


async def _value(result: Awaitable[Any]) -> Any:
    return await result
