"""Prompts and scorers of the evaluation sets."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colocated_grpo.environments.agents.endpoint import Endpoint
from colocated_grpo.environments.base import Episode, Item, Scorer
from colocated_grpo.environments.build import (
    EpisodeEnvironment,
    PlayedByAgents,
    RowsEnvironment,
    ScoredEnvironment,
    build_encoder,
    build_environment,
    encoded,
)
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.settings.evaluation import PREFIX, EvaluationSetConfig
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import RowsSourceConfig
from colocated_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATED_PROMPTS = 64
"""Default number of prompts of a task or an episode, which may yield items without end."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSource:
    """The prompts of one set, and what scores them."""

    config: EvaluationSetConfig
    environment: ScoredEnvironment | EpisodeEnvironment | PlayedByAgents

    @property
    def name(self) -> str:
        """`Prompt.source` of the prompts, and prefix of the metrics."""
        return self.environment.name

    def prompts(self, encoder: PromptEncoder, seed: int, first_index: int) -> tuple[list[Prompt], int]:
        """Return the prompts, and how many items were dropped as empty or too long. Rank 0 only: reads data."""
        return encoded(self._items(seed), self._count(), encoder, first_index=first_index, source=self.name)

    def filter_notes(self) -> list[str]:
        """Return log lines on rows that filters have left out. Rank 0 only: reads data."""
        return self.environment.rows.filter_notes if isinstance(self.environment, RowsEnvironment) else []

    def _items(self, seed: int) -> Iterator[Item]:
        if isinstance(self.environment, RowsEnvironment):
            return self.environment.all_items()
        return self.environment.held_out(seed)

    def _count(self) -> int:
        if self.config.prompts is not None:
            return self.config.prompts
        all_rows = sys.maxsize >> 1
        return all_rows if isinstance(self.environment, RowsEnvironment) else GENERATED_PROMPTS


@dataclass(frozen=True, kw_only=True)
class EvaluationSources:
    """All evaluation sets of a run. The same on every rank."""

    sources: Sequence[EvaluationSource]
    encoder: PromptEncoder
    seed: int

    @property
    def scorers(self) -> dict[str, Scorer]:
        """By Prompt.source."""
        made = (source.environment for source in self.sources)
        return {each.name: each.scorer for each in made if not isinstance(each, EpisodeEnvironment | PlayedByAgents)}

    @property
    def episodes(self) -> dict[str, Episode]:
        """By Prompt.source, for the sets without a scorer."""
        made = (source.environment for source in self.sources)
        return {each.name: each.episode for each in made if isinstance(each, EpisodeEnvironment)}

    @property
    def agents(self) -> dict[str, PlayedByAgents]:
        """By Prompt.source, for the other sets without a scorer."""
        made = (source.environment for source in self.sources)
        return {each.name: each for each in made if isinstance(each, PlayedByAgents)}


def build_evaluation_sources(
    config: Config, tokenizer: PreTrainedTokenizerBase, endpoint: Endpoint
) -> EvaluationSources:
    """Resolve every name and import user code; read no data. Raises EnvironmentSetupError.

    endpoint: where agents sample.
    """
    return EvaluationSources(
        sources=[_build(entry, config, endpoint) for entry in config.evaluation.sets],
        encoder=build_encoder(config, tokenizer, {_name(entry): entry.source for entry in config.evaluation.sets}),
        seed=config.seed,
    )


def _name(entry: EvaluationSetConfig) -> str:
    return f"{PREFIX}/{entry.name}"


def _build(entry: EvaluationSetConfig, config: Config, endpoint: Endpoint) -> EvaluationSource:
    source = entry.source
    if isinstance(source, RowsSourceConfig):
        source = source.model_copy(update={"held_out": 0})  # no row is left out
    return EvaluationSource(config=entry, environment=build_environment(_name(entry), source, config, endpoint))
