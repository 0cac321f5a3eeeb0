"""Replaces objects of a Python program (reward functions, tasks, episodes, rows) by names."""

from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, TypeGuard

from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.sources import EVAL_DATASETS, TRAIN_DATASET, reward_name

ObjectsByName = dict[str, object]
"""Objects by the names that refer to them in the settings and in the run's config.yaml."""
NOT_ROWS = "must be a datasets.Dataset or a list of dictionaries"


def is_name(value: object) -> TypeGuard[str | PathLike[str]]:
    return isinstance(value, str | PathLike)


def object_name(value: Any) -> str:
    """Return 'module:qualname' of a function or class; of the function in a partial; of the class of an instance."""
    target = value.func if isinstance(value, partial) else value
    if not hasattr(target, "__qualname__"):
        target = type(target)
    return f"{target.__module__}:{target.__qualname__}"


def name_object(value: object, name: str, objects: ObjectsByName) -> str:
    """Add an object under `name`. If another object has this name, append a number. Return the final name."""
    unique, number = name, 1
    while objects.get(unique, value) is not value:
        number += 1
        unique = f"{name}_{number}"
    objects[unique] = value
    return unique


def take_rewards(rewards: object, key: str, objects: ObjectsByName) -> list[dict[str, object]]:
    """Return the entries of `rewards` as settings, with functions replaced by names."""
    entries = rewards if isinstance(rewards, list | tuple) else [rewards]
    return [_take_reward(entry, f"{key}.{index}", objects) for index, entry in enumerate(entries)]


def _take_reward(entry: object, key: str, objects: ObjectsByName) -> dict[str, object]:
    settings = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
    function = settings.get("name")
    if function is None or is_name(function):
        return settings | {"name": reward_name(function)}
    if not callable(function):
        raise ConfigError(f"{key}={function!r}: must be a function, or the name of one")
    if hasattr(function, "state_dict") and hasattr(function, "forward"):
        raise ConfigError(f"{key}: a {type(function).__name__} is a model; write a function that scores with it")
    if settings.get("run_in") == "process":
        raise ConfigError(f"{key}.run_in='process': an object runs in threads; give the function's name instead")
    return settings | {"name": name_object(function, object_name(function), objects)}


def take_rows(rows: object, key: str, name: str, objects: ObjectsByName) -> str:
    """Return a dataset's name: `rows` itself if it is a name, else a name that refers to the rows."""
    if is_name(rows):
        return str(rows)
    if isinstance(rows, Mapping):
        raise ConfigError(f"{key}: a mapping of {', '.join(map(str, rows))}; {NOT_ROWS}, for example one of its values")
    if isinstance(rows, list | tuple):
        rows = list(rows)
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigError(f"{key}: entry {index} is a {type(row).__name__}; {NOT_ROWS}")
    elif not hasattr(rows, "select_columns") or not hasattr(rows, "__len__"):  # an IterableDataset has no length
        raise ConfigError(f"{key}: a {type(rows).__name__}; {NOT_ROWS}")
    return name_object(rows, name, objects)


def take_environments(entries: object, objects: ObjectsByName) -> object:
    """Return the `environments` setting with objects replaced by names. Other values are returned unchanged."""
    if not isinstance(entries, Sequence) or is_name(entries):
        return entries
    return [
        _take_environment(dict(entry), f"environments.{index}", objects) if isinstance(entry, Mapping) else entry
        for index, entry in enumerate(entries)
    ]


def _take_environment(entry: dict[str, object], key: str, objects: ObjectsByName) -> dict[str, object]:
    kind, name = entry.get("type", "task"), entry.get("name")
    if kind == "dataset":
        entry["rewards"] = take_rewards(entry.get("rewards", []), f"{key}.rewards", objects)
        for setting, title in (("name", TRAIN_DATASET), ("eval_split", EVAL_DATASETS)):
            if entry.get(setting) is not None:
                entry[setting] = take_rows(entry[setting], f"{key}.{setting}", title, objects)
    elif name is not None and not is_name(name):
        if kind not in ("task", "episode"):
            raise ConfigError(f"{key}.name: type {kind} needs a name, such as 'module:object'")
        entry["name"] = name_object(name, object_name(name), objects)
    return entry
