"""Rules for dynamic sampling and the order of rows. Each rule yields one error line per violation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from colocated_grpo.settings.atropos import AtroposSourceConfig
from colocated_grpo.settings.rows import ColumnCurriculumConfig
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import RowsSourceConfig
from colocated_grpo.settings.turns import TurnsSourceConfig

Lines = Iterator[str]


def _only_own_prompts_are_replaced(config: Config) -> Lines:
    if config.rollout.resample is None:
        return
    for index, source in enumerate(config.environments):
        if isinstance(source, AtroposSourceConfig):
            yield (
                f"rollout.resample: not possible with environments.{index} of type atropos, whose environments decide "
                "what is sampled; filter there, or set rollout.resample: null"
            )
        elif isinstance(source, TurnsSourceConfig):
            yield (
                f"rollout.resample: not possible with environments.{index} of type turns, where each turn continues a "
                "game; set rollout.resample: null"
            )


def _only_own_prompts_are_skipped(config: Config) -> Lines:
    if config.rollout.skip_solved is None:
        return
    for index, source in enumerate(config.environments):
        if isinstance(source, AtroposSourceConfig | TurnsSourceConfig):
            yield (
                f"rollout.skip_solved: not possible with environments.{index} of type {source.type}, whose prompts are "
                "not drawn from a list; set rollout.skip_solved: null"
            )


def _hard_rows_are_drawn(config: Config) -> Lines:
    for index, source in enumerate(config.environments):
        curriculum = source.curriculum if isinstance(source, RowsSourceConfig) else None
        if isinstance(curriculum, ColumnCurriculumConfig) and (curriculum.steps or 0) >= config.training_steps:
            yield (
                f"environments.{index}.curriculum.steps={curriculum.steps}: must be below training_steps="
                f"{config.training_steps}, or the hardest rows would never be drawn"
            )


SELECTION_RULES: tuple[Callable[[Config], Lines], ...] = (
    _only_own_prompts_are_replaced,
    _only_own_prompts_are_skipped,
    _hard_rows_are_drawn,
)
