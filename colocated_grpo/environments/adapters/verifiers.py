"""Single-turn tasksets of verifiers 0.4: one question, one answer, and rewards that read the conversation only.

The library runs its own rollouts: an agent program in a runtime, with the model behind an HTTP server. This adapter
uses its tasks only, for the prompt and the rewards; the policy generates the answer, as everywhere in this project.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, signature
from typing import Any

from pydantic import Field, PrivateAttr, ValidationError

from colocated_grpo.config.base import Section
from colocated_grpo.environments.base import EnvironmentSetupError, Item, Split
from colocated_grpo.environments.conversation import Conversation
from colocated_grpo.environments.tasks.procedural import in_split
from colocated_grpo.environments.user_code.loading import import_optional
from colocated_grpo.types import JsonObject

KEY = "environments 'verifiers'"
RUNTIME_HOOKS = ("setup", "finalize")
"""Hooks of a task that need the library's runtime."""


class Verifiers(Section):
    """Reward: the weighted sum of the task's rewards. Each reward and metric of the task is a part of the score."""

    taskset: str
    """Id of the taskset: the name of its installed package."""
    config: JsonObject = {}
    """Settings of the taskset."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of the answer. null: rollout.max_completion_tokens."""

    _taskset: Any = PrivateAttr()
    _task_type: Any = PrivateAttr()

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        import_optional("verifiers.v1", "verifiers", KEY)
        loaders = import_optional("verifiers.v1.utils.loaders", "verifiers", KEY)
        from verifiers.v1 import SingleAgentEnv

        settings = self._settings(loaders.taskset_config_type(self.taskset))
        self._taskset = loaders.load_taskset(settings)
        self._task_type = self._taskset.task_type()
        if loaders.environment_class(self.taskset) is not SingleAgentEnv:
            raise self._unsupported("it comes with an environment of its own")
        if self._taskset.toolsets(settings) or self._task_type.toolsets(settings.task):
            raise self._unsupported("it comes with tools")
        self._check_task(next(iter(self._taskset), None))

    def _settings(self, settings_type: Any) -> Any:
        try:
            return settings_type.model_validate({**self.config, "id": self.taskset})
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(["args.config", *map(str, problem["loc"])])
            if problem["type"] == "extra_forbidden":
                known = ", ".join(name for name in settings_type.model_fields if name != "id")
                rule = f": unknown key of taskset {self.taskset!r}; it has: {known}"
            else:
                rule = f"={problem['input']!r}: {problem['msg']}"
            raise EnvironmentSetupError(f"{KEY}: {key}{rule}") from None

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        for task in self._taskset.shuffle(seed) if self._taskset.bounded else self._taskset:
            if in_split(task.key, split):
                yield {"prompt": _messages(task.data), "data": task.data.model_dump(mode="json")}

    async def run(self, item: Item, model: Conversation) -> dict[str, float]:
        task = self._task_type(self._task_type.data_type().model_validate(item["data"]), self._taskset.config.task)
        turn = await model.generate(self.max_turn_tokens)
        trace = _trace(task, item["prompt"], turn.text)
        await task.score(trace)
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return {**trace.metrics, **scores, "reward": trace.reward}

    def _check_task(self, task: Any) -> None:
        """Raise EnvironmentSetupError if a task needs more than a prompt and its rewards."""
        if task is None:
            raise EnvironmentSetupError(f"{KEY}: taskset {self.taskset!r} has no tasks")
        if task.data.prompt is None:
            raise self._unsupported("its tasks have no prompt")
        own_hooks = {hook for base in _own_classes(self._task_type) for hook in vars(base)}
        if task.NEEDS_CONTAINER or own_hooks.intersection(RUNTIME_HOOKS):
            raise self._unsupported("its tasks need a runtime")
        judges = [judge.score for judge in task.plugged_judges()]
        for hook in (*task.hooks("reward"), *task.hooks("metric"), *judges):
            runtime = signature(hook).parameters.get("runtime")
            if runtime is not None and runtime.default is Parameter.empty:
                raise self._unsupported("its rewards need a runtime")
        if not task.hooks("reward") and not judges:
            raise self._unsupported("its tasks have no rewards")

    def _unsupported(self, reason: str) -> EnvironmentSetupError:
        return EnvironmentSetupError(
            f"{KEY}: taskset {self.taskset!r}: {reason}; only single-turn tasks without tools are supported"
        )


def _own_classes(task: type) -> Iterator[type]:
    """Return the classes of a task that are not the library's own."""
    from verifiers.v1 import Task

    return (base for base in task.__mro__ if base is not object and base not in Task.__mro__)


def _messages(data: Any) -> list[JsonObject]:
    """Return the prompt of a task as chat messages."""
    if isinstance(data.prompt, str):
        messages = [{"role": "user", "content": data.prompt}]
    else:
        messages = [message.model_dump(mode="json", exclude_none=True) for message in data.prompt]
    return messages if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}, *messages]


def _trace(task: Any, prompt: list[JsonObject], answer: str) -> Any:
    """Return the conversation in the form that the library's rewards read."""
    from verifiers.v1 import AgentConfig, AgentInfo, MessageNode, Trace, TraceTask

    messages = [*prompt, {"role": "assistant", "content": answer}]
    nodes = [
        MessageNode(message=message, parent=index - 1 if index else None, sampled=index == len(prompt))
        for index, message in enumerate(messages)
    ]
    trace_task = TraceTask(type=type(task).__name__, data=task.data, key=task.key)
    return Trace(task=trace_task, agent=AgentInfo(config=AgentConfig()), nodes=nodes, is_completed=True)
