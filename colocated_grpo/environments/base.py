"""Contracts of environments: tasks, episodes, scorers and the source of training prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from colocated_grpo.environments.conversation import Conversation
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.types import Completion, Group, JsonObject, Prompt, Score

Split = Literal["train", "held_out"]
Item = dict[str, Any]
"""One instance of a task: "prompt" (text or chat messages) plus the fields that its scorer or episode reads."""


class EnvironmentSetupError(ConfigError):
    """An environment cannot be built or yields no usable prompts. The message is one line for the user."""


class AnswerError(ValueError):
    """Raised by a score() or an episode for an answer that it cannot read. The answer is counted as unscorable."""

    def __init__(self, message: str, reward: float = 0.0) -> None:
        super().__init__(message)
        self.reward = reward


@runtime_checkable
class Task(Protocol):
    """Yields prompts and scores their completions."""

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        """Yield items.

        The same arguments must yield the same sequence, or a run cannot be resumed. A finite "train" sequence is
        restarted when it ends; a "held_out" one may end.
        """
        ...

    def score(self, item: Item, completion: str) -> float | dict[str, float] | None:
        """Return the reward, named parts including "reward", or None if not applicable. Must be thread-safe.

        An exception gives the answer reward 0 (`rewards.scoring`) or, if it is not the answer's fault, none.
        """
        ...


@runtime_checkable
class Seekable(Protocol):
    """A task or an episode with endless sequences and random access, so that a long run resumes at once."""

    def prompts_from(self, seed: int, split: Split, start: int) -> Iterator[Item]:
        """Yield the items of prompts() without the first `start`, which are not generated."""
        ...


@runtime_checkable
class Episode(Protocol):
    """Multi-turn conversations: policy and environment alternate until the reward is known.

    One object runs all episodes of a rank concurrently: keep the state of an episode in local variables of `run`.
    """

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        """Yield items, as Task.prompts does. An item's "prompt" is the start of the conversation."""
        ...

    async def run(self, item: Item, model: Conversation) -> float | dict[str, float] | None:
        """Run one episode and return its reward, as Task.score does.

        All episodes run on one event loop: move blocking work to threads. An exception fails this episode only.
        If ContextExhausted is not caught, the reward is 0.
        """
        ...


class Scorer(Protocol):
    """Scores the completions of one environment. Must be thread-safe."""

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        """Return one score per completion. An exception in user code only sets its completion's Score."""
        ...


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The groups that train in this step, with metrics. Plain data: computed on rank 0 and broadcast to every rank."""

    trained_now: list[int]
    """Indices of the recorded groups that train in this step. The others are pending or dropped."""
    released: list[Group] = field(default_factory=list)
    """Pending groups of earlier steps that are trained now."""
    metrics: dict[str, float] = field(default_factory=dict)
    games: list[JsonObject] = field(default_factory=list)
    """Records of games that ended, for the run folder."""
    finished: bool = False
    """The environment's goal is reached: the run ends after this step."""


def merge_results(parts: Sequence[BatchResult]) -> BatchResult:
    """Merge results whose `trained_now` already indexes the whole batch."""
    return BatchResult(
        trained_now=sorted(position for part in parts for position in part.trained_now),
        released=[group for part in parts for group in part.released],
        metrics={name: value for part in parts for name, value in part.metrics.items()},
        games=[game for part in parts for game in part.games],
        finished=any(part.finished for part in parts),
    )


class BatchSource(Protocol):
    """Source of training prompts. Lives on rank 0 only."""

    def next(self, n: int) -> list[Prompt]:
        """Return `n` policy prompts plus any opponent prompts. Fewer policy prompts if all games await the opponent."""
        ...

    def record(self, groups: Sequence[Group]) -> BatchResult:
        """Record the scored groups of every prompt of the last next() and decide which of them train."""
        ...

    def state_dict(self) -> JsonObject:
        """Return the position as plain data. A source that loads it returns the same next prompts as this one."""
        ...

    def load_state_dict(self, state: JsonObject) -> None: ...
