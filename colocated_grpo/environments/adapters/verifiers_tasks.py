"""Tasksets of verifiers 0.4: the items of their tasks, and the rewards of finished tasks."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from colocated_grpo.environments.base import EnvironmentSetupError, Item, Split
from colocated_grpo.environments.tasks.procedural import in_split
from colocated_grpo.environments.user_code.loading import import_optional, make_importable
from colocated_grpo.types import JsonObject

KEY = "environments 'verifiers'"
RUNTIME_HOOKS = ("setup", "finalize")
"""Hooks of a task that need the library's runtime."""
Model = TypeVar("Model", bound=BaseModel)


class VerifiersTasks:
    """A taskset.

    Raises EnvironmentSetupError if the taskset cannot be loaded, or if its tasks have no prompt or no rewards.
    """

    def __init__(self, name: str, config: JsonObject) -> None:
        """name: id of the taskset. config: its settings."""
        self.name = name
        import_optional("verifiers.v1", "verifiers", KEY)
        make_importable(os.getcwd())
        loaders = import_optional("verifiers.v1.utils.loaders", "verifiers", KEY)
        from verifiers.v1 import SingleAgentEnv

        settings_type = loaders.taskset_config_type(name)
        self.settings = validated(settings_type, {**config, "id": name}, "args.config", f"taskset {name!r}")
        self.taskset = loaders.load_taskset(self.settings)
        self.task_type = self.taskset.task_type()
        if loaders.environment_class(name) is not SingleAgentEnv:
            raise self.unsupported("it comes with an environment of its own")
        self.first: Any = next(iter(self.taskset), None)
        """The first task. All tasks are of one type."""
        if self.first is None:
            raise EnvironmentSetupError(f"{KEY}: taskset {name!r} has no tasks")
        if self.first.data.prompt is None:
            raise self.unsupported("its tasks have no prompt")
        if not self.first.hooks("reward") and not self.first.plugged_judges():
            raise self.unsupported("its tasks have no rewards")

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        for task in self.taskset.shuffle(seed) if self.taskset.bounded else self.taskset:
            if in_split(task.key, split):
                yield {"prompt": messages_of(task.data), "data": task.data.model_dump(mode="json")}

    def task_of(self, item: Item) -> Any:
        """Return the task of an item, in the library's own form."""
        return self.task_type(self.task_type.data_type().model_validate(item["data"]), self.taskset.config.task)

    def make_importable_for_servers(self) -> None:
        """Add the folder of the taskset's module to PYTHONPATH, unless the module is installed.

        The processes of tool servers import the module too, but run in another working directory.
        """
        top = Path(str(sys.modules[type(self.taskset).__module__.partition(".")[0]].__file__)).resolve()
        folder = str(top.parents[1] if top.name == "__init__.py" else top.parent)
        if folder not in {str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib")}:
            folders = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), folder]
            os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, folders)))

    @property
    def has_tools(self) -> bool:
        return bool(self.taskset.toolsets(self.settings) or self.task_type.toolsets(self.settings.task))

    @property
    def needs_runtime(self) -> bool:
        """True if the tasks need a container, or if their hooks or rewards use the agent's runtime."""
        own_hooks = {hook for base in _own_classes(self.task_type) for hook in vars(base)}
        if self.first.NEEDS_CONTAINER or own_hooks.intersection(RUNTIME_HOOKS):
            return True
        judges = [judge.score for judge in self.first.plugged_judges()]
        scoring = (*self.first.hooks("reward"), *self.first.hooks("metric"), *judges)
        given = [signature(hook).parameters.get("runtime") for hook in scoring]
        return any(runtime is not None and runtime.default is Parameter.empty for runtime in given)

    def unsupported(self, reason: str) -> EnvironmentSetupError:
        return EnvironmentSetupError(f"{KEY}: taskset {self.name!r}: {reason}, which is not supported")


def validated(settings_type: type[Model], values: JsonObject, key: str, owner: str) -> Model:
    """Return the settings as an object of the library.

    Raises EnvironmentSetupError with the key of the first problem. key: position of the settings in the config. owner:
    such as "the agent", for the error line.
    """
    try:
        return settings_type.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join([key, *map(str, problem["loc"])])
        if problem["type"] == "extra_forbidden":
            known = ", ".join(name for name in settings_type.model_fields if name != "id")
            rule = f": unknown key of {owner}; it has: {known}"
        else:
            rule = f"={problem['input']!r}: {problem['msg']}"
        raise EnvironmentSetupError(f"{KEY}: {place}{rule}") from None


def messages_of(data: Any) -> list[JsonObject]:
    """Return the prompt of a task as messages of OpenAI's chat API."""
    from verifiers.v1.dialects.chat import message_to_wire

    if isinstance(data.prompt, str):
        messages = [{"role": "user", "content": data.prompt}]
    else:
        messages = [message_to_wire(message) for message in data.prompt]
    return messages if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}, *messages]


def result_of(trace: Any) -> dict[str, float]:
    """Return the weighted sum of the rewards, and each reward and metric as a part."""
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {**metrics, **scores, "reward": trace.reward}


def _own_classes(task: type) -> Iterator[type]:
    """Return the classes of a task that are not the library's own."""
    from verifiers.v1 import Task

    return (base for base in task.__mro__ if base is not object and base not in Task.__mro__)
