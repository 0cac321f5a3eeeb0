"""The built-in tasks, and lookup of tasks by name."""

from __future__ import annotations

from functools import partial
from typing import Any

from colocated_grpo.environments.base import Task
from colocated_grpo.environments.registry import check_methods, find_environment
from colocated_grpo.environments.tasks.arithmetic import Arithmetic
from colocated_grpo.environments.tasks.countdown import Countdown
from colocated_grpo.environments.tasks.reasoning_gym import ReasoningGym
from colocated_grpo.environments.tasks.reversal import Reversal
from colocated_grpo.environments.tasks.sorting import Sorting
from colocated_grpo.environments.tasks.tool_call import ToolCall
from colocated_grpo.environments.tasks.town_lessons import TownLessons
from colocated_grpo.environments.user_code.loading import construct
from colocated_grpo.types import JsonObject

TASKS = {
    "arithmetic": Arithmetic,
    "countdown": Countdown,
    "reversal": Reversal,
    "sorting": Sorting,
    "tool_call": ToolCall,
    "town_lessons": TownLessons,
}
REASONING_GYM_PREFIX = "reasoning_gym:"
REASONING_GYM_FORM = f"{REASONING_GYM_PREFIX}<dataset>"


def build_task(name: str, args: JsonObject, given: Any = None) -> Task:
    """Build a built-in task, 'reasoning_gym:<dataset>', an installed one, or the user's 'module:object'.

    given: the user's object itself, if a program has passed it.
    """
    if given is None and name.startswith(REASONING_GYM_PREFIX):
        dataset = name.removeprefix(REASONING_GYM_PREFIX)
        return construct(partial(ReasoningGym, dataset), args, f"environments {name!r}")
    task = find_environment("task", name, args, TASKS, REASONING_GYM_FORM, given=given)
    check_methods(task, "a task", ("prompts", "score"), name)
    return task
