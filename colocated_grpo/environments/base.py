"""Interfaces of environments: tasks, episodes, scorers, items, and entries built from the config."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from colocated_grpo.environments.chat import Conversation
from colocated_grpo.errors import ConfigError
from colocated_grpo.types import Completion, Group, JsonObject, Prompt, Score

Split = Literal["train", "held_out"]
Item = JsonObject
"""One instance of a task: "prompt" (text or chat messages) plus the fields that its scorer or episode reads."""


class EnvironmentSetupError(ConfigError):
    """An environment cannot be built or yields no usable prompts. The message is one line for the user."""


class AnswerError(ValueError):
    """Raise this in score() or in an episode if an answer cannot be read. The answer counts as unscorable."""

    def __init__(self, message: str, reward: float = 0.0) -> None:
        super().__init__(message)
        self.reward = reward


@runtime_checkable
class Task(Protocol):
    """Yields prompts and scores their completions."""

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        """Yield items.

        The same arguments must yield the same sequence, or a run cannot be resumed. Both splits may be finite: "train"
        is restarted when it ends, "held_out" is not.
        """

    def score(self, item: Item, completion: str) -> float | dict[str, float] | None:
        """Return the reward, a dict of named parts with "reward", or None if no reward applies. Must be thread-safe.

        If an answer causes an exception, the answer's reward is the lowest of 0 (or `AnswerError.reward`) and the
        rewards of the prompt's other completions. If the scorer itself fails, the completion has no reward.
        `rewards.scoring` tells the two cases apart.
        """


@runtime_checkable
class Seekable(Protocol):
    """A task or an episode with endless items, readable from any position: a resumed run skips earlier items."""

    def prompts_from(self, seed: int, split: Split, start: int) -> Iterator[Item]:
        """Yield the items of prompts() from position `start` on. Earlier items are not generated."""


@runtime_checkable
class Episode(Protocol):
    """Multi-turn conversations: policy and environment alternate until the reward is known.

    One object runs all episodes of a rank concurrently: keep the state of an episode in local variables of `run`.
    """

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        """Yield items, as Task.prompts does. An item's "prompt" is the start of the conversation."""

    async def run(self, item: Item, model: Conversation) -> float | dict[str, float] | None:
        """Run one episode and return its reward, as Task.score does.

        Run blocking work in threads, because all episodes share one event loop. An exception fails only this episode.
        If `run` does not catch ContextExhausted, the reward is 0.
        """


class Playable(Protocol):
    """An `Episode` or an `AgentEpisode`."""

    async def run(self, item: Item, model: Any) -> object:
        """Run one episode and return its reward. model: a `Conversation`, or an `AgentConversation` for agents."""


class Scorer(Protocol):
    """Scores the completions of one environment. Must be thread-safe."""

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        """Return one score per completion. Exceptions of user code are not raised, but recorded in `Score.error`."""


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The groups that train in this step, with metrics. Plain data: computed on rank 0 and broadcast to every rank."""

    trained_now: list[int]
    """Indices of the recorded groups that train in this step. All other groups are pending or dropped."""
    released: list[Group] = field(default_factory=list)
    """Pending groups that train now, sampled in this step or in an earlier step."""
    metrics: dict[str, float] = field(default_factory=dict)
    games: list[JsonObject] = field(default_factory=list)
    """Records of games that ended, for the run folder."""
    finished: bool = False
    """True if the environment's goal is reached. The run then ends after this step."""


def merge_results(parts: Sequence[BatchResult]) -> BatchResult:
    """Merge the results of several sources. Their `trained_now` must already index the whole batch."""
    return BatchResult(
        trained_now=sorted(position for part in parts for position in part.trained_now),
        released=[group for part in parts for group in part.released],
        metrics={name: value for part in parts for name, value in part.metrics.items()},
        games=[game for part in parts for game in part.games],
        finished=any(part.finished for part in parts),
    )


class ItemStream:
    """Endless training items of one environment. By default, every group trains in the step that sampled it."""

    max_attempts: int = 1000
    """Maximum consecutive unusable items before the caller gives up."""

    def take(self) -> Item:
        raise NotImplementedError

    def reject(self, item: Item) -> None:
        """Report that `item`, the last item taken, is not usable as a prompt."""

    def record(self, groups: Sequence[Group]) -> BatchResult:
        """Record the scored groups of all items taken since the last call."""
        return BatchResult(trained_now=list(range(len(groups))))

    def state_dict(self) -> JsonObject:
        raise NotImplementedError

    def load_state_dict(self, state: JsonObject) -> None:
        raise NotImplementedError


class Items:
    """The items of one environment. Members are used on rank 0 only, because any member may read data."""

    default_count = 64
    """Default number of prompts of an evaluation set. There is a limit because the items may be endless."""

    @property
    def filter_notes(self) -> Sequence[str]:
        """Log lines about rows that filters left out."""
        return ()

    @property
    def held_out_note(self) -> str | None:
        """Log line if there are too few rows to hold any out by default; None otherwise."""
        return None

    def open_stream(self, seed: int) -> ItemStream:
        """Return a stream of training items that starts at the first item."""
        raise NotImplementedError

    def held_out(self, seed: int) -> Iterator[Item]:
        """Yield items that no run trains on. Every call yields the same items."""
        raise NotImplementedError

    def evaluated(self, seed: int) -> Iterator[Item]:
        """Yield the items of an evaluation set. Every call yields the same items."""
        return self.held_out(seed)


@dataclass(frozen=True, kw_only=True)
class AgentLimits:
    """Limits on the agents of one environment."""

    max_tokens: int
    """Maximum tokens of a sequence: prompt and completion of one request together."""
    max_requests: int
    """Maximum completions of one agent."""
    max_running: int
    """Maximum agents that run at the same time on one rank."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One entry of the config: its items, and their scorer or episode. Identical on every rank."""

    name: str
    """`Prompt.source` of its prompts, unique in the run."""
    items: Items
    scorer: Scorer | None = None
    """Scores single completions. None if `episode` plays whole conversations instead."""
    episode: Playable | None = None
    limits: AgentLimits | None = None
    """Limits of the agents. Set only if agents request the episode's turns over HTTP."""
