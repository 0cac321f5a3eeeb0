"""Several `eval_datasets` of a program as evaluation sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colocated_grpo.api.objects import ObjectsByName, is_name, take_rows
from colocated_grpo.settings.errors import ConfigError, KeyPath
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import DATA_SUFFIXES, EVAL_DATASETS, DatasetSourceConfig

_SHARED = {"rewards", "prompt_column", "columns", "system_prompt", "tools", "chat_template_kwargs"}
"""Settings that the sets take from the training data."""


def evaluation_sets(datasets: Mapping[Any, Any], config: Config, objects: ObjectsByName) -> dict[KeyPath, Any]:
    """Return the settings by which each dataset is a set of its own, after the sets of `config`.

    The sets have the rewards, the columns and the template settings of the training data, and are sampled as held-out
    prompts are. No training rows are held out unless a setting says so. Raises ConfigError.
    """
    entry, evaluation = config.environments[0], config.evaluation
    if not isinstance(entry, DatasetSourceConfig):
        raise ConfigError(f"{EVAL_DATASETS}: needs a train_dataset, whose columns and rewards these datasets share")
    if not datasets:
        raise ConfigError(f"{EVAL_DATASETS}={{}}: must have an entry, or be left out")
    shared = entry.model_dump(mode="json", include=_SHARED)
    sets = [
        {
            "name": str(name),
            "source": {"type": "dataset", "name": _rows_of(name, rows, objects), **shared},
            "samples": evaluation.samples_per_prompt,
            "temperature": evaluation.temperature,
        }
        for name, rows in datasets.items()
    ]
    settings: dict[KeyPath, Any] = {
        ("evaluation", "sets"): [*(each.model_dump(mode="json") for each in evaluation.sets), *sets]
    }
    if entry.held_out is None and entry.eval_split is None:
        settings["environments", 0, "held_out"] = 0
    return settings


def _rows_of(name: Any, rows: Any, objects: ObjectsByName) -> str:
    """Return the name of a file, or one that stands for the rows."""
    key = f"{EVAL_DATASETS}[{name}]"
    if is_name(rows) and Path(rows).suffix.lower() not in DATA_SUFFIXES:
        raise ConfigError(
            f"{key}={str(rows)!r}: must be rows or a file ({', '.join(DATA_SUFFIXES)}); write a dataset of the Hub in "
            "evaluation.sets, with its split"
        )
    return take_rows(rows, key, key, objects)
