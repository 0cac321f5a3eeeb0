"""Length of a run in passes over its training rows, as TRL gives it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from colocated_grpo.environments.rows.dataset import num_held_out
from colocated_grpo.environments.rows.row_filter import RowFilter, load_filter
from colocated_grpo.settings.errors import ConfigError, KeyPath
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import DatasetSourceConfig

Settings = dict[KeyPath, Any]
UNCOUNTED = 1 << 31
"""Steps of a run whose rows have not been counted. No rule finds it too short."""
_STEPS: KeyPath = ("training_steps",)
_NEEDS_ROWS = "needs a train_dataset of rows as the only environment"


@dataclass(frozen=True)
class Epochs:
    """Passes over the training rows."""

    number: float
    by_default: bool
    """TRL's default, which a script may also have written: a config file's training_steps take precedence."""

    def __str__(self) -> str:
        return f"num_train_epochs={self.number:g}"


def take_epochs(settings: Settings, default: float | None) -> Epochs | None:
    """Remove the epochs from a program's settings and return them; None where it gives steps, or neither.

    default: of TRL's GRPOConfig, if the program has one. Raises ConfigError.
    """
    number = settings.pop(("num_train_epochs",), None)
    if settings.keys() & {_STEPS, ("max_steps",)}:
        return None
    if number is None:
        return None if default is None else Epochs(default, by_default=True)
    if not isinstance(number, int | float) or not 0 < number < math.inf:
        raise ConfigError(f"num_train_epochs={number!r}: must be a number above 0")
    return Epochs(number, by_default=False)


def in_steps(epochs: Epochs, config: Config) -> tuple[Settings, str]:
    """Return the setting that makes a run as long, and a line that says so.

    Default epochs that cannot be counted set nothing. Raises ConfigError for others.
    """
    entry, *others = config.environments
    if others or not isinstance(entry, DatasetSourceConfig) or entry.given is None:
        if not epochs.by_default:
            raise ConfigError(f"{epochs}: {_NEEDS_ROWS}; or set training_steps")
        steps = Config.model_fields["training_steps"].default
        return {}, f"training_steps={steps}: the default; {epochs} {_NEEDS_ROWS}; set max_steps"
    rows, prompts = _num_rows(entry), config.rollout.prompts_per_step
    steps = max(1, math.ceil(rows * epochs.number / prompts))
    return {_STEPS: steps}, f"training_steps={steps}: {epochs} over {rows} rows, {prompts} prompts a step"


def _num_rows(entry: DatasetSourceConfig) -> int:
    """Return the number of rows that a run trains on."""
    key = "environments.0"
    try:
        kept, _ = RowFilter(entry, load_filter(entry, key)).kept(entry.given)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    return len(kept) - (num_held_out(entry, len(kept)) if entry.eval_split is None else 0)
