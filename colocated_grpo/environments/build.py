"""Construction of scorers, episodes and prompt streams from the config's list of environments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from colocated_grpo.environments.agents.conversation import AgentLimits
from colocated_grpo.environments.agents.endpoint import Endpoint
from colocated_grpo.environments.agents.episode import AgentEpisode, AgentTasks, build_agent
from colocated_grpo.environments.base import BatchSource, EnvironmentSetupError, Episode, Item, Scorer, Task
from colocated_grpo.environments.curriculum import EasyToHard, RestingItems
from colocated_grpo.environments.dataset import DatasetRows
from colocated_grpo.environments.episodes import build_episode
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.environments.rewards.functions import build_rewards
from colocated_grpo.environments.rewards.scorer import RewardScorer, start_workers
from colocated_grpo.environments.rewards.scoring import TaskScorer
from colocated_grpo.environments.row_filter import Keep, load_filter
from colocated_grpo.environments.solved import UnsolvedItems
from colocated_grpo.environments.source import Mixture, PromptSource
from colocated_grpo.environments.streams import ItemStream, Prompting, RowStream, TaskStream, task_items
from colocated_grpo.environments.tasks import build_task
from colocated_grpo.environments.templates import build_template, check_is_read
from colocated_grpo.environments.turns.registry import build_turn_games
from colocated_grpo.settings.atropos import AtroposSourceConfig
from colocated_grpo.settings.rows import ColumnCurriculumConfig
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.selection import SkipSolvedConfig
from colocated_grpo.settings.sources import (
    AgentSourceConfig,
    DatasetSourceConfig,
    EpisodeSourceConfig,
    RowsSourceConfig,
    TaskSourceConfig,
)
from colocated_grpo.settings.turns import TurnsSourceConfig
from colocated_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptedConfig = TaskSourceConfig | DatasetSourceConfig | EpisodeSourceConfig | TurnsSourceConfig
"""Entries whose prompts this run samples itself. Agents sample over HTTP, and groups arrive from Atropos."""
MAX_DROPPED_HELD_OUT = 1000
"""Held-out items that may be dropped before the search for usable ones ends."""


class Environment(Protocol):
    """One entry of the config that yields prompts."""

    @property
    def name(self) -> str: ...

    def open_stream(self, seed: int) -> ItemStream:
        """Return the training items from their beginning. Rank 0 only: reads data."""
        ...

    def held_out(self, seed: int) -> Iterator[Item]:
        """Yield items that no run trains on, always the same ones. Rank 0 only: reads data."""
        ...


class ScoredEnvironment(Environment, Protocol):
    """An environment that scores single completions: tasks, datasets and turn games, but not episodes."""

    @property
    def scorer(self) -> Scorer: ...


class PromptingEnvironment:
    """An object of an environment yields the prompts."""

    def __init__(self, name: str, prompting: Prompting) -> None:
        self.name = name
        self._prompting = prompting

    def open_stream(self, seed: int) -> TaskStream:
        return TaskStream(self.name, self._prompting, seed)

    def held_out(self, seed: int) -> Iterator[Item]:
        return task_items(self.name, self._prompting, seed, "held_out")


class TaskEnvironment(PromptingEnvironment):
    """A task yields the prompts and scores the completions."""

    def __init__(self, name: str, task: Task) -> None:
        super().__init__(name, task)
        self.scorer = TaskScorer(task)


class EpisodeEnvironment(PromptingEnvironment):
    """An episode yields the prompts and runs the conversations."""

    def __init__(self, name: str, episode: Episode) -> None:
        super().__init__(name, episode)
        self.episode = episode


class RowsEnvironment:
    """Rows yield the prompts. They are loaded on first use, on rank 0 only."""

    def __init__(
        self, name: str, config: RowsSourceConfig, check: Callable[[Item], None], keep: Keep | None = None
    ) -> None:
        """check: raises EnvironmentSetupError for an item that cannot be scored. keep: the function `filter`."""
        self.name = name
        self.config = config
        self._check = check
        self._keep = keep

    @cached_property
    def rows(self) -> DatasetRows:
        return DatasetRows(self.name, self.config, self._check, self._keep)

    def open_stream(self, seed: int) -> ItemStream:
        rows, curriculum = self.rows, self.config.curriculum
        order_seed = seed if self.config.shuffle else None
        to_item = partial(rows.item, rows.train)
        if isinstance(curriculum, ColumnCurriculumConfig):
            return EasyToHard(self.name, rows.train, to_item, order_seed, rows.difficulties(curriculum), curriculum)
        stream = RowStream(self.name, rows.train, to_item, order_seed)
        return stream if curriculum is None else RestingItems(stream, self.name, curriculum)

    def all_items(self) -> Iterator[Item]:
        """Yield the training rows in the order of the data. Rank 0 only: reads data."""
        rows = self.rows
        return (rows.item(rows.train, index) for index in range(len(rows.train)))

    def held_out(self, seed: int) -> Iterator[Item]:
        rows = self.rows
        return (rows.item(rows.held_out, index) for index in range(len(rows.held_out)))


class DatasetEnvironment(RowsEnvironment):
    """Reward functions score the completions."""

    def __init__(self, name: str, config: DatasetSourceConfig, scorer: RewardScorer, keep: Keep | None = None) -> None:
        super().__init__(name, config, scorer.check_item, keep)
        self.scorer = scorer


class AgentEnvironment(RowsEnvironment):
    """A program of the user plays the episodes and returns the rewards."""

    def __init__(self, name: str, config: AgentSourceConfig, endpoint: Endpoint, max_tokens: int) -> None:
        """max_tokens: longest sequence, prompt and completion together."""
        key = f"environments {name!r}"
        super().__init__(name, config, lambda item: None, load_filter(config, key))
        self.limits = AgentLimits(
            max_tokens=max_tokens, max_requests=config.max_requests, max_running=config.max_running
        )
        self.episode = AgentEpisode(build_agent(config, key), endpoint)


class AgentTasksEnvironment(PromptingEnvironment):
    """An agent of another library plays the library's tasks and returns the rewards."""

    def __init__(self, name: str, tasks: AgentTasks, endpoint: Endpoint, max_tokens: int) -> None:
        """max_tokens: longest sequence, prompt and completion together."""
        super().__init__(name, tasks)
        self.limits = AgentLimits(max_tokens=max_tokens, max_requests=tasks.max_requests, max_running=tasks.max_running)
        self.episode = AgentEpisode(tasks, endpoint)


PlayedByAgents = AgentEnvironment | AgentTasksEnvironment
"""Environments whose episodes sample over HTTP."""


@dataclass(frozen=True, kw_only=True)
class Environments:
    """All environments of a run."""

    scorers: dict[str, Scorer]
    """By Prompt.source. The same on every rank."""
    episodes: dict[str, Episode]
    """By Prompt.source, for sources without a scorer. The same on every rank."""
    agents: dict[str, PlayedByAgents]
    """By Prompt.source, for the other sources without a scorer. The same on every rank."""
    endpoint: Endpoint
    """Where the agents of this rank sample."""
    entries: Sequence[Environment]
    weights: dict[str, float]
    encoder: PromptEncoder
    seed: int
    skip_solved: SkipSolvedConfig | None = None

    def open_source(self) -> BatchSource:
        """Return the source of training prompts. Rank 0 only: reads data."""
        streams = {entry.name: self._open_stream(entry) for entry in self.entries}
        return PromptSource(streams, self.weights, self.encoder)

    def _open_stream(self, entry: Environment) -> ItemStream:
        stream = entry.open_stream(self.seed)
        return stream if self.skip_solved is None else UnsolvedItems(stream, entry.name, self.skip_solved)

    def held_out(self, n: int) -> list[Prompt]:
        """Return up to n prompts that are never trained on, mixed by weight; always the same ones. Rank 0 only."""
        if not self.entries:
            return []
        mixture = Mixture(self.weights)
        for _ in range(n):
            mixture.counts[mixture.next_name()] += 1
        prompts: list[Prompt] = []
        for entry in self.entries:
            prompts += self._held_out_of(entry, mixture.counts[entry.name], first_index=len(prompts))
        return prompts

    def filter_notes(self) -> list[str]:
        """Return log lines on rows that filters have left out. Rank 0 only: reads data."""
        datasets = [entry.rows for entry in self.entries if isinstance(entry, RowsEnvironment)]
        return [line for rows in datasets for line in rows.filter_notes]

    def held_out_notes(self) -> list[str]:
        """Return log lines for datasets too small to hold out rows by default. Rank 0 only: reads data."""
        datasets = [entry.rows for entry in self.entries if isinstance(entry, RowsEnvironment)]
        return [rows.held_out_note for rows in datasets if rows.held_out_note is not None]

    def _held_out_of(self, entry: Environment, count: int, first_index: int) -> list[Prompt]:
        prompts, _ = encoded(entry.held_out(self.seed), count, self.encoder, first_index=first_index, source=entry.name)
        return prompts


def encoded(
    items: Iterator[Item], count: int, encoder: PromptEncoder, *, first_index: int, source: str
) -> tuple[list[Prompt], int]:
    """Return the first `count` usable prompts of `items`, or all there are, and how many items were dropped.

    Raises EnvironmentSetupError if there are items and none is usable.
    """
    prompts: list[Prompt] = []
    dropped = 0
    for item in islice(items, count + MAX_DROPPED_HELD_OUT):
        if len(prompts) == count:
            break
        prompt = encoder.encode(item, index=first_index + len(prompts), source=source)
        if prompt is None:
            dropped += 1
        else:
            prompts.append(prompt)
    if dropped and not prompts:
        raise encoder.no_usable_prompt(source, dropped)
    return prompts, dropped


def build_environments(config: Config, tokenizer: PreTrainedTokenizerBase) -> Environments:
    """Resolve every name and import user code; read no data. Raises EnvironmentSetupError."""
    prompted = [entry for entry in config.environments if not isinstance(entry, AtroposSourceConfig)]
    names = _unique([entry.name for entry in prompted])
    for name in config.model.chat_template_kwargs:
        check_is_read(tokenizer, f"model.chat_template_kwargs.{name}", name)
    endpoint = Endpoint()
    entries = [build_environment(name, entry, config, endpoint) for name, entry in zip(names, prompted, strict=True)]
    return Environments(
        scorers={e.name: e.scorer for e in entries if not isinstance(e, EpisodeEnvironment | PlayedByAgents)},
        episodes={e.name: e.episode for e in entries if isinstance(e, EpisodeEnvironment)},
        agents={e.name: e for e in entries if isinstance(e, PlayedByAgents)},
        endpoint=endpoint,
        entries=entries,
        weights={name: entry.weight for name, entry in zip(names, prompted, strict=True)},
        encoder=build_encoder(config, tokenizer, dict(zip(names, prompted, strict=True))),
        seed=config.seed,
        skip_solved=config.rollout.skip_solved,
    )


def build_environment(
    name: str, entry: PromptedConfig | AgentSourceConfig, config: Config, endpoint: Endpoint
) -> ScoredEnvironment | EpisodeEnvironment | PlayedByAgents:
    """Resolve the names of one entry and import its user code; read no data. Raises EnvironmentSetupError."""
    if isinstance(entry, AgentSourceConfig):
        return AgentEnvironment(name, entry, endpoint, config.max_sequence_tokens)
    if isinstance(entry, DatasetSourceConfig):
        rewards = build_rewards(entry.rewards, key := f"environments {name!r}: rewards")
        workers = start_workers(entry.rewards, rewards, key)
        scorer = RewardScorer(rewards, config.optimizer_steps, workers)
        return DatasetEnvironment(name, entry, scorer, load_filter(entry, f"environments {name!r}"))
    if isinstance(entry, EpisodeSourceConfig):
        episode = build_episode(entry.name, entry.args, entry.given)
        if isinstance(episode, AgentTasks):
            _reject_prompt_settings(name, entry)
            return AgentTasksEnvironment(name, episode, endpoint, config.max_sequence_tokens)
        return EpisodeEnvironment(name, episode)
    if isinstance(entry, TurnsSourceConfig):
        return build_turn_games(name, entry, config)
    return TaskEnvironment(name, build_task(entry.name, entry.args, entry.given))


def _reject_prompt_settings(name: str, entry: EpisodeSourceConfig) -> None:
    """Raise EnvironmentSetupError for settings of prompts, which would have no effect on the requests of an agent."""
    for key in ("system_prompt", "tools", "chat_template_kwargs"):
        if getattr(entry, key):
            raise EnvironmentSetupError(
                f"environments {name!r}: {key}: an agent plays it, and writes its own requests; remove it"
            )


def build_encoder(
    config: Config, tokenizer: PreTrainedTokenizerBase, entries: Mapping[str, PromptedConfig | AgentSourceConfig]
) -> PromptEncoder:
    """Build the encoder of these sources. Raises EnvironmentSetupError if the chat template ignores a setting."""
    variables = config.model.chat_template_kwargs
    templates = {name: build_template(entry, name, tokenizer, variables) for name, entry in entries.items()}
    return PromptEncoder(tokenizer, config.rollout.max_prompt_tokens, templates)


def _unique(names: list[str]) -> list[str]:
    """Number repeated names: scorers and stream positions are stored by name."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return unique
