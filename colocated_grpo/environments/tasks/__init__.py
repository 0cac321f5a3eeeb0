"""The built-in tasks, and tasks by name."""

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

TASKS = {
    "arithmetic": Arithmetic,
    "countdown": Countdown,
    "reversal": Reversal,
    "sorting": Sorting,
    "tool_call": ToolCall,
    "town_lessons": TownLessons,
}
GYM = "reasoning_gym:"
FORM = f"{GYM}<dataset>"


def build_task(name: str, args: dict[str, Any]) -> Task:
    """A built-in task, 'reasoning_gym:<dataset>', an installed one, or the user's 'module:object'."""
    if name.startswith(GYM):
        return construct(partial(ReasoningGym, name.removeprefix(GYM)), args, f"environments {name!r}")
    task = find_environment("task", name, args, TASKS, FORM)
    check_methods(task, "a task", ("prompts", "score"), name)
    return task
