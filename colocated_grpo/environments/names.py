"""Early check of the names in `environments`, by lookup alone: user code is not imported.

The launcher runs it, so that a misspelled name fails before the ranks start.
"""

from __future__ import annotations

from colocated_grpo.environments.adapters import FORMS, TURN_FORMS, is_adapted
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.episodes import EPISODES
from colocated_grpo.environments.registry import check_name
from colocated_grpo.environments.rewards.functions import check_reward_name
from colocated_grpo.environments.tasks import REASONING_GYM_FORM, TASKS
from colocated_grpo.environments.turns.registry import TURN_ENVIRONMENTS
from colocated_grpo.settings.base import NamedObject
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import (
    DatasetSourceConfig,
    EnvironmentConfig,
    EpisodeSourceConfig,
    TaskSourceConfig,
)
from colocated_grpo.settings.turns import TurnsSourceConfig


def check_names(config: Config) -> None:
    """Raise ConfigError with one line per name that is not built in, not installed and not of a user-code form."""
    lines = []
    for entry in [*config.environments, *(entry.source for entry in config.evaluation.sets)]:
        try:
            _check(entry)
        except EnvironmentSetupError as error:
            lines.append(str(error))
    if lines:
        raise ConfigError(*lines)


def _check(entry: EnvironmentConfig) -> None:
    if isinstance(entry, DatasetSourceConfig):
        for reward in (reward for reward in entry.rewards if reward.given is None):
            check_reward_name(reward.name, f"environments {entry.name!r}: rewards")
    elif isinstance(entry, NamedObject) and entry.given is not None:
        return
    elif isinstance(entry, TaskSourceConfig):
        check_name("task", entry.name, TASKS, REASONING_GYM_FORM)
    elif isinstance(entry, EpisodeSourceConfig) and not is_adapted(entry.name):
        check_name("episode", entry.name, EPISODES, *FORMS)
    elif isinstance(entry, TurnsSourceConfig) and not is_adapted(entry.name):
        check_name("turn environment", entry.name, TURN_ENVIRONMENTS, *TURN_FORMS)
