"""Tasksets of verifiers 0.4 whose tasks are one question and one answer, judged by what was said.

The library plays its own rollouts: an agent program in a runtime, with the model behind an HTTP server of its own. None
of that is used here. Its tasks ask and judge; the turn between is the policy's, as everywhere in this project.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, signature
from typing import Any

from pydantic import Field, PrivateAttr

from colocated_grpo.config.base import Section
from colocated_grpo.environments.base import EnvironmentSetupError, Split
from colocated_grpo.environments.conversation import Conversation
from colocated_grpo.environments.tasks.procedural import in_split
from colocated_grpo.environments.user_code.loading import import_optional

KEY = "environments 'verifiers'"
OWN_TURNS = ("setup", "finalize")
"""Hooks of a task that need the library's runtime."""


class Verifiers(Section):
    """Reward: the weighted sum of the task's rewards. Its single rewards and its metrics are parts of the score."""

    taskset: str
    """Id of an installed taskset: the name of its package."""
    config: dict[str, Any] = {}
    """The taskset's own settings."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Longest answer. Not given: as long as there is room."""

    _taskset: Any = PrivateAttr()
    _type: Any = PrivateAttr()
    """Of its tasks."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        import_optional("verifiers.v1", "verifiers", KEY)
        loaders = import_optional("verifiers.v1.utils.loaders", "verifiers", KEY)
        from verifiers.v1 import SingleAgentEnv

        settings = loaders.taskset_config_type(self.taskset).model_validate({**self.config, "id": self.taskset})
        self._taskset = loaders.load_taskset(settings)
        self._type = self._taskset.task_type()
        if loaders.environment_class(self.taskset) is not SingleAgentEnv:
            raise self._refusal("it comes with an environment of its own")
        if self._taskset.toolsets(settings) or self._type.toolsets(settings.task):
            raise self._refusal("it comes with tools")
        self._check_task(next(iter(self._taskset), None))

    def prompts(self, seed: int, split: Split) -> Iterator[dict[str, Any]]:
        for task in self._taskset.shuffle(seed) if self._taskset.bounded else self._taskset:
            if in_split(task.key, split):
                yield {"prompt": _messages(task.data), "data": task.data.model_dump(mode="json")}

    async def run(self, item: dict[str, Any], model: Conversation) -> dict[str, float]:
        task = self._type(self._type.data_type().model_validate(item["data"]), self._taskset.config.task)
        turn = await model.generate(self.max_turn_tokens)
        trace = _trace(task, item["prompt"], turn.text)
        await task.score(trace)
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return {**trace.metrics, **scores, "reward": trace.reward}

    def _check_task(self, task: Any) -> None:
        """Raise one line where a task asks for more than a question, an answer and a judge."""
        if task is None:
            raise EnvironmentSetupError(f"{KEY}: taskset {self.taskset!r} has no tasks")
        if task.data.prompt is None:
            raise self._refusal("its tasks have no prompt")
        if task.NEEDS_CONTAINER or any(hook in vars(base) for base in _own_classes(self._type) for hook in OWN_TURNS):
            raise self._refusal("its tasks need a runtime")
        judges = [judge.score for judge in task.plugged_judges()]
        for hook in (*task.hooks("reward"), *task.hooks("metric"), *judges):
            runtime = signature(hook).parameters.get("runtime")
            if runtime is not None and runtime.default is Parameter.empty:
                raise self._refusal("its rewards need a runtime")
        if not task.hooks("reward") and not judges:
            raise self._refusal("its tasks have no rewards")

    def _refusal(self, why: str) -> EnvironmentSetupError:
        return EnvironmentSetupError(
            f"{KEY}: taskset {self.taskset!r}: {why}; only tasks of one question and one answer are played here"
        )


def _own_classes(task: type) -> Iterator[type]:
    """The task's classes down to the library's base."""
    from verifiers.v1 import Task

    return (base for base in task.__mro__ if base is not object and base not in Task.__mro__)


def _messages(data: Any) -> list[dict[str, Any]]:
    asked = data.prompt
    if isinstance(asked, str):
        messages = [{"role": "user", "content": asked}]
    else:
        messages = [message.model_dump(mode="json", exclude_none=True) for message in asked]
    return messages if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}, *messages]


def _trace(task: Any, asked: list[dict[str, Any]], answer: str) -> Any:
    """The conversation as the library's judges expect it."""
    from verifiers.v1 import AgentConfig, AgentInfo, MessageNode, Trace, TraceTask

    messages = [*asked, {"role": "assistant", "content": answer}]
    nodes = [
        MessageNode(message=message, parent=place - 1 if place else None, sampled=place == len(asked))
        for place, message in enumerate(messages)
    ]
    traced = TraceTask(type=type(task).__name__, data=task.data, key=task.key)
    return Trace(task=traced, agent=AgentInfo(config=AgentConfig()), nodes=nodes, is_completed=True)
