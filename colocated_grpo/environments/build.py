"""From the config's list of environments to scorers and sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from colocated_grpo.config.atropos import AtroposSourceConfig
from colocated_grpo.config.schema import Config
from colocated_grpo.config.sources import DatasetSourceConfig, EnvironmentConfig, EpisodeSourceConfig
from colocated_grpo.config.turns import TurnsSourceConfig
from colocated_grpo.environments.base import BatchSource, Episode, Scorer, Task
from colocated_grpo.environments.dataset import DatasetRows
from colocated_grpo.environments.episodes import build_episode
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.environments.rewards.functions import RewardScorer, build_rewards
from colocated_grpo.environments.rewards.scoring import TaskScorer
from colocated_grpo.environments.source import Mixture, PromptSource
from colocated_grpo.environments.streams import RowStream, Stream, TaskStream, prompts_of
from colocated_grpo.environments.tasks import build_task
from colocated_grpo.environments.turns.registry import turn_games
from colocated_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_RUN_OF_DROPPED_HELD_OUT = 1000


class Environment(Protocol):
    """One entry of the config."""

    name: str

    def open_stream(self, seed: int) -> Stream: ...

    def held_out(self, seed: int) -> Iterator[dict[str, Any]]: ...


class TaskEnvironment:
    """A task asks and judges."""

    def __init__(self, name: str, task: Task) -> None:
        self.name = name
        self.task = task
        self.scorer = TaskScorer(task)

    def open_stream(self, seed: int) -> TaskStream:
        return TaskStream(self.name, self.task, seed)

    def held_out(self, seed: int) -> Iterator[dict[str, Any]]:
        return prompts_of(self.name, self.task, seed, "held_out")


class EpisodeEnvironment:
    """An episode asks, answers and judges."""

    def __init__(self, name: str, episode: Episode) -> None:
        self.name = name
        self.episode = episode

    def open_stream(self, seed: int) -> TaskStream:
        return TaskStream(self.name, self.episode, seed)

    def held_out(self, seed: int) -> Iterator[dict[str, Any]]:
        return prompts_of(self.name, self.episode, seed, "held_out")


class DatasetEnvironment:
    """Rows ask, reward functions judge. Rows are read on first use: only rank 0 needs them."""

    def __init__(self, name: str, config: DatasetSourceConfig, scorer: RewardScorer) -> None:
        self.name = name
        self.config = config
        self.scorer = scorer

    @cached_property
    def rows(self) -> DatasetRows:
        return DatasetRows(self.name, self.config, self.scorer.check_columns)

    def open_stream(self, seed: int) -> RowStream:
        rows = self.rows
        order_seed = seed if self.config.shuffle else None
        return RowStream(self.name, rows.train, lambda index: rows.item(rows.train, index), order_seed)

    def held_out(self, seed: int) -> Iterator[dict[str, Any]]:
        rows = self.rows
        return (rows.item(rows.held_out, index) for index in range(len(rows.held_out)))


@dataclass(frozen=True, kw_only=True)
class Environments:
    """Everything that asks and judges in one run."""

    scorers: dict[str, Scorer]
    """Judges of single completions by Prompt.source. The same on every rank."""
    episodes: dict[str, Episode]
    """Players of all other sources."""
    entries: list[Environment]
    weights: dict[str, float]
    encoder: PromptEncoder
    seed: int

    def open_source(self) -> BatchSource:
        """Training prompts. Rank 0 only: reads data."""
        streams = {entry.name: entry.open_stream(self.seed) for entry in self.entries}
        return PromptSource(streams, self.weights, self.encoder)

    def held_out(self, n: int) -> list[Prompt]:
        """Up to n prompts that are never trained on, shared out by weight; always the same ones. Rank 0 only."""
        if not self.entries:
            return []
        shares = Mixture(self.weights)
        for _ in range(n):
            shares.counts[shares.due()] += 1
        prompts: list[Prompt] = []
        for entry in self.entries:
            prompts += self._held_out_of(entry, shares.counts[entry.name], first_index=len(prompts))
        return prompts

    def remarks(self) -> list[str]:
        """What deserves a word about the prompts that are held out. Rank 0 only: reads data."""
        rows = [entry.rows for entry in self.entries if isinstance(entry, DatasetEnvironment)]
        return [part.remark for part in rows if part.remark is not None]

    def _held_out_of(self, entry: Environment, share: int, first_index: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        dropped = 0
        for item in islice(entry.held_out(self.seed), share + LONGEST_RUN_OF_DROPPED_HELD_OUT):
            if len(prompts) == share:
                break
            prompt = self.encoder.encode(item, index=first_index + len(prompts), source=entry.name)
            if prompt is None:
                dropped += 1
            else:
                prompts.append(prompt)
        if dropped and not prompts:
            raise self.encoder.too_long(entry.name, dropped)
        return prompts


def build_environments(config: Config, tokenizer: PreTrainedTokenizerBase) -> Environments:
    """Every name resolved, every user module imported; no data read. Raises EnvironmentSetupError with one line."""
    prompted = [entry for entry in config.environments if not isinstance(entry, AtroposSourceConfig)]
    names = _unique([entry.name for entry in prompted])
    entries = [_build(name, entry, config) for name, entry in zip(names, prompted, strict=True)]
    return Environments(
        scorers={e.name: e.scorer for e in entries if not isinstance(e, EpisodeEnvironment)},
        episodes={e.name: e.episode for e in entries if isinstance(e, EpisodeEnvironment)},
        entries=entries,
        weights={name: entry.weight for name, entry in zip(names, prompted, strict=True)},
        encoder=PromptEncoder(tokenizer, config.rollout.max_prompt_tokens),
        seed=config.seed,
    )


def _build(name: str, entry: EnvironmentConfig, config: Config) -> Environment:
    if isinstance(entry, DatasetSourceConfig):
        rewards = build_rewards(entry.rewards, f"environments {name!r}: rewards")
        return DatasetEnvironment(name, entry, RewardScorer(rewards, config.optimizer_steps))
    if isinstance(entry, EpisodeSourceConfig):
        return EpisodeEnvironment(name, build_episode(entry.name, entry.args))
    if isinstance(entry, TurnsSourceConfig):
        return turn_games(name, entry, config)
    return TaskEnvironment(name, build_task(entry.name, entry.args))


def _unique(names: list[str]) -> list[str]:
    """Repeated names get a number: scorers and cursors are kept by name."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return unique
