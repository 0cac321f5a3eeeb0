"""What an environment is made of. The contracts that tasks, scorers and sources keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from colocated_grpo.config.errors import ConfigError
from colocated_grpo.environments.conversation import Conversation
from colocated_grpo.types import Completion, Group, Prompt, Score

Split = Literal["train", "held_out"]


class EnvironmentSetupError(ConfigError):
    """An environment cannot be built or cannot give prompts; the message is one line for the user."""


@runtime_checkable
class Task(Protocol):
    """Questions and their judge in one object."""

    def prompts(self, seed: int, split: Split) -> Iterator[dict[str, Any]]:
        """Items with a "prompt" (text or chat messages) and whatever score() needs.

        The same arguments give the same sequence, or a run cannot be resumed. A train sequence that ends is
        started again; a held-out one may end.
        """

    def score(self, item: dict[str, Any], completion: str) -> float | dict[str, float] | None:
        """The reward, or named parts of which "reward" trains; None: not applicable. Called from several threads."""


@runtime_checkable
class Seekable(Protocol):
    """A task or an episode whose sequences have no end and can be entered anywhere: a long run then resumes at once."""

    def prompts_from(self, seed: int, split: Split, start: int) -> Iterator[dict[str, Any]]:
        """What prompts() gives after its first `start` items, without making those."""


@runtime_checkable
class Episode(Protocol):
    """Conversations of several turns: the policy speaks, the environment answers, until it knows the reward.

    One object plays all episodes of a rank, many at once: what belongs to one episode lives inside `run`.
    """

    def prompts(self, seed: int, split: Split) -> Iterator[dict[str, Any]]:
        """As Task.prompts: items with the "prompt" that opens the conversation, and whatever run() needs."""

    async def run(self, item: dict[str, Any], model: Conversation) -> float | dict[str, float] | None:
        """One episode; its reward, as Task.score gives it. Runs on an event loop: blocking work goes to threads.

        What it raises costs this episode only. OutOfRoom may pass: the reward is then 0.
        """


class Scorer(Protocol):
    """Judge of one environment; may be called from several threads at once."""

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        """One score for each completion of the prompt. User code that raises costs its completion only: Score.error."""


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What becomes of a step's groups. Plain data: rank 0 decides, every rank is told."""

    now: list[int]
    """Positions, among the groups given, of those that are trained in this step. The others are held back or lost."""
    late: list[Group] = field(default_factory=list)
    """Groups held back in earlier steps that are trained now."""
    metrics: dict[str, float] = field(default_factory=dict)
    games: list[dict[str, Any]] = field(default_factory=list)
    """Records of ended games, for the run folder."""
    finished: bool = False
    """The source has nothing more to teach: the run ends after this step."""


def joined(parts: Sequence[Settled]) -> Settled:
    """All as one. Their positions are already those among the groups of all."""
    return Settled(
        now=sorted(place for part in parts for place in part.now),
        late=[group for part in parts for group in part.late],
        metrics={name: value for part in parts for name, value in part.metrics.items()},
        games=[game for part in parts for game in part.games],
        finished=any(part.finished for part in parts),
    )


class BatchSource(Protocol):
    """Where training prompts come from. Lives on rank 0 only."""

    def next(self, n: int) -> list[Prompt]:
        """`n` prompts for the policy, and those that an opponent has to answer; fewer where all games wait for it."""
        ...

    def record(self, groups: Sequence[Group]) -> Settled:
        """Take in the scored groups of all prompts that the last next() gave."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Plain data; after load_state_dict of it, next() gives what this source would have given."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
