"""Interfaces of environments: tasks, episodes, scorers, entries built from the config, and the source of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from colocated_grpo.environments.chat import Conversation
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.types import Completion, Group, JsonObject, Prompt, Score

Split = Literal["train", "held_out"]
Item = JsonObject
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

        An exception gives reward 0 if the answer caused it, else no reward (`rewards.scoring`).
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


class Playable(Protocol):
    """An `Episode`, or an agent's."""

    async def run(self, item: Item, model: Any) -> object:
        """Return the reward. model: the `Conversation`, or the `AgentConversation` of an agent."""
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


class ItemStream(Protocol):
    """Endless training items of one environment."""

    @property
    def max_attempts(self) -> int:
        """Maximum consecutive unusable items before the caller gives up."""
        ...

    def take(self) -> Item:
        """Return the next item."""
        ...

    def reject(self, item: Item) -> None:
        """Report that the item just taken is not usable as a prompt."""
        ...

    def record(self, groups: Sequence[Group]) -> BatchResult:
        """Record the scored groups of all items taken since the last call."""
        ...

    def state_dict(self) -> JsonObject: ...

    def load_state_dict(self, state: JsonObject) -> None: ...


class Items:
    """The items of one environment. Rank 0 only: all members may read data."""

    default_count = 64
    """Default number of prompts of an evaluation set, because these items may be endless."""

    @property
    def filter_notes(self) -> Sequence[str]:
        """Log lines on rows that filters have left out."""
        return ()

    @property
    def held_out_note(self) -> str | None:
        """A log line if there are too few rows to hold out some by default."""
        return None

    def open_stream(self, seed: int) -> ItemStream:
        """Return the training items from their beginning."""
        raise NotImplementedError

    def held_out(self, seed: int) -> Iterator[Item]:
        """Yield items that no run trains on, always the same ones."""
        raise NotImplementedError

    def evaluated(self, seed: int) -> Iterator[Item]:
        """Yield the items of an evaluation set, always the same ones."""
        return self.held_out(seed)


@dataclass(frozen=True, kw_only=True)
class AgentLimits:
    """Limits on the agents of one environment."""

    max_tokens: int
    """Longest sequence, prompt and completion of a request together."""
    max_requests: int
    """Completions of one agent."""
    max_running: int
    """Agents that run at a time on one rank."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One entry of the config: its items, and their scorer or episode. The same on every rank."""

    name: str
    """`Prompt.source` of its prompts, unique in the run."""
    items: Items
    scorer: Scorer | None = None
    """Scores single completions. None: `episode` plays whole conversations."""
    episode: Playable | None = None
    limits: AgentLimits | None = None
    """Set for an episode whose turns an agent requests over HTTP."""


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
