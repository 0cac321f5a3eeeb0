"""The built-in tasks, and tasks by name."""

from __future__ import annotations

from functools import partial
from typing import Any

from colocated_grpo.environments.base import EnvironmentSetupError, Task
from colocated_grpo.environments.tasks.arithmetic import Arithmetic
from colocated_grpo.environments.tasks.countdown import Countdown
from colocated_grpo.environments.tasks.reasoning_gym import ReasoningGym
from colocated_grpo.environments.tasks.reversal import Reversal
from colocated_grpo.environments.tasks.sorting import Sorting
from colocated_grpo.environments.tasks.town_lessons import TownLessons
from colocated_grpo.environments.user_code import construct, load_object, unknown_name

TASKS = {
    "arithmetic": Arithmetic,
    "countdown": Countdown,
    "reversal": Reversal,
    "sorting": Sorting,
    "town_lessons": TownLessons,
}
GYM = "reasoning_gym:"


def build_task(name: str, args: dict[str, Any]) -> Task:
    """A built-in task, 'reasoning_gym:<dataset>', or the user's 'module:object': a class is called with args."""
    key = f"environments {name!r}"
    if name in TASKS:
        return construct(TASKS[name], args, key)
    if name.startswith(GYM):
        return construct(partial(ReasoningGym, name.removeprefix(GYM)), args, key)
    if ":" not in name:
        forms = ["reasoning_gym:<dataset>", "module:object", "path/to/file.py:object"]
        raise unknown_name("environments", "task", name, [*TASKS, *forms])
    return _user_task(name, args, key)


def _user_task(name: str, args: dict[str, Any], key: str) -> Task:
    found = load_object(name, key)
    if isinstance(found, type):
        found = construct(found, args, key)
    elif args:
        raise EnvironmentSetupError(f"{key}: args={args} given, but the object is an instance, not a class")
    if not isinstance(found, Task):
        missing = [method for method in ("prompts", "score") if not callable(getattr(found, method, None))]
        raise EnvironmentSetupError(
            f"{key}: not a task, it has no {' and no '.join(f'{method}()' for method in missing)}"
        )
    return found
