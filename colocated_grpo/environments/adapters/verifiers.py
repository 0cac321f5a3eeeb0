"""Tasksets of verifiers 0.4: its tasks give the prompts and the rewards.

A task of one question and one answer is answered by the policy directly, as everywhere in this project. Tasks with
tools, and those whose hooks or rewards need a runtime, are played by the library's own agent: `verifiers_agent`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

from pydantic import Field

from colocated_grpo.environments.adapters.verifiers_agent import VerifiersAgent
from colocated_grpo.environments.adapters.verifiers_tasks import KEY, VerifiersTasks, result_of
from colocated_grpo.environments.agents.episode import AgentTasks
from colocated_grpo.environments.base import EnvironmentSetupError, Episode, Item, Split
from colocated_grpo.environments.conversation import Conversation
from colocated_grpo.settings.base import Section
from colocated_grpo.types import JsonObject

LIMITS = ("max_requests", "max_running")


class Verifiers(Section):
    """Reward: the weighted sum of the task's rewards. Each reward and metric of the task is a part of the score."""

    taskset: str
    """Id of the taskset: the name of its package, which is installed or in the working directory."""
    config: JsonObject = {}
    """Settings of the taskset."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of an answer. null: as many as fit."""
    agent: JsonObject | None = None
    """Settings of verifiers' agent, as under `[env.agent]` in its own configs. If given, even as {}, the agent plays.
    null: it plays the tasks that need it, with its default settings."""
    max_requests: int = Field(64, ge=1)
    """Completions that one agent may ask for."""
    max_running: int = Field(32, ge=1)
    """Agents that run at a time on one rank."""

    def episode(self) -> Episode | AgentTasks:
        """Load the taskset. Raises EnvironmentSetupError."""
        tasks = VerifiersTasks(self.taskset, self.config)
        if self.agent is not None or tasks.has_tools or tasks.needs_runtime:
            return VerifiersAgent(tasks, self.agent or {}, self.max_turn_tokens, self.max_requests, self.max_running)
        for name in LIMITS:
            if name in self.model_fields_set:
                raise EnvironmentSetupError(f"{KEY}: args.{name}: taskset {self.taskset!r} needs no agent; remove it")
        return SingleTurn(tasks, self.max_turn_tokens)


@wraps(Verifiers, updated=())  # its signature is what settings are checked against
def build_verifiers(**args: Any) -> Episode | AgentTasks:
    return Verifiers(**args).episode()


class SingleTurn:
    """Tasks that the policy answers directly."""

    def __init__(self, tasks: VerifiersTasks, max_turn_tokens: int | None) -> None:
        self._tasks = tasks
        self._max_turn_tokens = max_turn_tokens

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        return self._tasks.prompts(seed, split)

    async def run(self, item: Item, model: Conversation) -> dict[str, float]:
        task = self._tasks.task_of(item)
        turn = await model.generate(self._max_turn_tokens)
        trace = _trace(task, item["prompt"], turn.text)
        await task.score(trace)
        return result_of(trace)


def _trace(task: Any, prompt: list[JsonObject], answer: str) -> Any:
    """Return the conversation in the form that the library's rewards read."""
    from verifiers.v1 import AgentConfig, AgentInfo, MessageNode, Trace, TraceTask
    from verifiers.v1.dialects.chat import parse_message

    messages = [*prompt, {"role": "assistant", "content": answer}]
    nodes = [
        MessageNode(message=parse_message(message), parent=index - 1 if index else None, sampled=index == len(prompt))
        for index, message in enumerate(messages)
    ]
    trace_task = TraceTask(type=type(task).__name__, data=task.data, key=task.key)
    return Trace(task=trace_task, agent=AgentInfo(config=AgentConfig()), nodes=nodes, is_completed=True)
