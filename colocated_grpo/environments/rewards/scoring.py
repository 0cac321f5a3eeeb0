"""Scoring by a task's own score(). An exception affects only the completion that caused it.

A malformed answer on which a scorer raises is a bad answer: the policy must learn to avoid it. A scorer that fails on
every answer is broken, gives no reward, and ends a run by rollout.max_reward_errors.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from inspect import isawaitable
from typing import Any

from colocated_grpo.environments.base import AnswerError, Task
from colocated_grpo.environments.user_code.loading import ReusableLoop, one_line
from colocated_grpo.types import Completion, Prompt, Score

REWARD_LOOP = ReusableLoop()
"""Event loop on which this process runs the coroutines of reward functions and tasks."""
MAX_REWARD = 1e30
"""Largest absolute reward. Squares and weighted sums of much larger rewards would overflow a float."""
PARSING_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError,
    re.error,
)  # fmt: skip
"""Exceptions that code raises while it parses an unexpected answer. Other exceptions, such as OSError, NameError or the
exceptions of an HTTP client, are not caused by the answer."""
Worst = Callable[[Sequence[float]], float]
"""Chooses the worst reward: min, or max for a function of negative weight."""
NOT_RUN = "a dry run reads no weights"


class NoReward(Exception):
    """Why a completion has no reward. A reward function returns it in place of a number; others keep their rewards."""


class TaskScorer:
    """Scores each completion with one call of task.score."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        score, item = self.task.score, prompt.item
        return score_each([lambda text=text: as_score(resolve_awaitable(score(item, text))) for text in texts])


def score_each(
    calls: Iterable[Callable[[], Score]], explain: Callable[[BaseException], str] = one_line, worst: Worst = min
) -> list[Score]:
    """Call a function for each completion. Exceptions become Score.error. worst: see reward_of_unscorable."""
    results: list[Score | BaseException] = []
    for call in calls:
        try:
            results.append(call())
        except BaseException as error:  # some timeout errors derive from it, to pass `except Exception` in user code
            results.append(error)
    scored = [each.reward for each in results if isinstance(each, Score) and each.reward is not None]

    def unscorable(error: BaseException) -> Score:
        return Score(reward=reward_of_unscorable(error, scored, worst), error=explain(error))

    return [each if isinstance(each, Score) else unscorable(each) for each in results]


def as_score(result: object, source: str = "score()") -> Score:
    """Convert a number, None or a dict of named parts. Raises ValueError for a dict without "reward".

    source: the function that returned the result.
    """
    if not isinstance(result, dict):
        return Score(reward=as_number(result))
    parts = {str(name): number for name, value in result.items() if (number := as_number(value)) is not None}
    if "reward" not in result:
        raise ValueError(f"{source} returned parts without 'reward': {', '.join(map(str, result)) or 'none'}")
    return Score(reward=parts.pop("reward", None), parts=parts)


def as_number(value: Any) -> float | None:
    """Convert to a finite float. None and NaN give None (TRL's "not applicable"); any other value raises."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__") or abs(number := float(value)) > MAX_REWARD:
        raise ValueError(f"a reward must be None or a number up to {MAX_REWARD:g} in size, got {value!r}")
    return None if math.isnan(number) else number


def resolve_awaitable(result: object) -> object:
    """Return the result, awaited on REWARD_LOOP if it is a coroutine or another awaitable."""
    if not isawaitable(result):
        return result
    return asyncio.run_coroutine_threadsafe(_value(result), REWARD_LOOP.get()).result()


async def _value(result: Awaitable[object]) -> object:
    return await result


def reward_of_unscorable(error: BaseException, scored: Sequence[float], worst: Worst) -> float | None:
    """Return the reward of an answer on which the scorer raised `error`; None if the scorer itself failed.

    scored: rewards of the prompt's other completions. If `scored` is empty, the scorer counts as failed, unless it
    raised AnswerError. The reward is the worst of `scored` and 0 (or `AnswerError.reward`), so that unreadable answers
    do not pay.
    """
    if isinstance(error, AnswerError):
        return worst([error.reward, *scored])
    return worst([0.0, *scored]) if scored and isinstance(error, PARSING_ERRORS) and not sets_alarm(error) else None


def sets_alarm(error: BaseException | None) -> bool:
    """Return True for the error of signal.alarm() in a thread, such as math-verify's timeout, or what replaced it."""
    return error is not None and ("signal only works in main" in one_line(error) or sets_alarm(error.__context__))
