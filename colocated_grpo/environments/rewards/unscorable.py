"""Answers that make a scorer raise: their reward, and which exceptions are the answer's fault.

A scorer that parses answers may raise on a malformed one. Such an answer gets a reward like any other bad one, because
a policy that may fail without loss does not learn to avoid it. A scorer that fails on every answer is broken: its
completions get no reward, and the run stops above rollout.max_reward_errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from colocated_grpo.environments.base import AnswerError

PARSING_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    re.error,
)
"""Exceptions of code that reads an unexpected answer. Others, such as OSError, NameError or the exceptions of an HTTP
client, say nothing about the answer."""


def reward_of_unscorable(
    error: BaseException, scored: Sequence[float], worst: Callable[[Sequence[float]], float] = min
) -> float | None:
    """Return the reward of an answer on which the scorer raised `error`; None if the scorer itself failed.

    scored: rewards of the prompt's other completions. Without one there is no sign that the scorer works, unless it
    raised AnswerError. The reward is the worst of 0 and its siblings': it must not pay to be unreadable.
    worst: max for a function of negative weight.
    """
    if isinstance(error, AnswerError):
        return worst([error.reward, *scored])
    return worst([0.0, *scored]) if scored and isinstance(error, PARSING_ERRORS) else None
