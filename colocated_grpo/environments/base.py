"""What an environment is made of. The contracts that tasks, scorers and sources keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from colocated_grpo.config.errors import ConfigError
from colocated_grpo.environments.conversation import Conversation
from colocated_grpo.types import Completion, Prompt, Score

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


class BatchSource(Protocol):
    """Where training prompts come from. Lives on rank 0 only."""

    def next(self, n: int) -> list[Prompt]: ...

    def state_dict(self) -> dict[str, Any]:
        """Plain data; after load_state_dict of it, next() gives what this source would have given."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...
