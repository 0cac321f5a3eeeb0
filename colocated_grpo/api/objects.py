"""Replaces objects of a Python program (models, tokenizers, reward functions, tasks, episodes, rows) by names."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard, cast

from colocated_grpo.errors import ConfigError
from colocated_grpo.settings import config_file, generation, sources

ObjectsByName = dict[str, object]
"""Objects by the names that refer to them in the settings and in the run's config.yaml."""
NOT_ROWS = "must be a datasets.Dataset or a list of dictionaries"


def is_name(value: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(value, str | os.PathLike)


def object_name(value: Any) -> str:
    """Return 'module:qualname' of a function, a class or a partial's function; for an instance, `__name__` or class."""
    target = value.func if isinstance(value, partial) else value
    if hasattr(target, "__qualname__"):
        return f"{target.__module__}:{target.__qualname__}"
    return f"{type(target).__module__}:{getattr(target, '__name__', type(target).__qualname__)}"


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
    if is_name(function):
        return settings | {"name": sources.reward_name(function)}
    if not callable(function):
        raise ConfigError(f"{key}={entry!r}: must be a function, or the name of one, alone or as `name` of a mapping")
    if hasattr(function, "state_dict") and hasattr(function, "forward"):
        raise ConfigError(f"{key}: a {type(function).__name__} is a model; give its folder or name, as './folder'")
    if settings.get("run_in") == "process":
        raise ConfigError(f"{key}.run_in='process': an object runs in threads; give the function's name instead")
    return settings | {"name": name_object(function, object_name(function), objects)}


def take_rows(rows: object, key: str, name: str, objects: ObjectsByName) -> str:
    """Return a dataset's name: `rows` itself if it is a name, else a name that refers to the rows."""
    if is_name(rows):
        return str(rows)
    if isinstance(rows, Mapping):
        raise ConfigError(f"{key}: a mapping of {', '.join(map(str, rows))}; {NOT_ROWS}; of a DatasetDict, one value")
    if isinstance(rows, list | tuple):
        rows = list(rows)
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigError(f"{key}: entry {index} is of type {type(row).__name__}; {NOT_ROWS}")
            if other := [name for name in row if not isinstance(name, str)]:
                raise ConfigError(f"{key}: entry {index} has the key {other[0]!r}; columns must have text as names")
    elif not hasattr(rows, "select_columns"):
        raise ConfigError(f"{key}: of type {type(rows).__name__}; {NOT_ROWS}")
    elif images := {"image", "images"}.intersection(getattr(rows, "column_names", None) or ()):
        raise ConfigError(f"{key}: prompts have no images here; remove the column {min(images)} to train on the text")
    return name_object(rows, name, objects)


def is_stream(rows: object) -> bool:
    """Return True for an IterableDataset, which has no length."""
    return hasattr(rows, "select_columns") and not hasattr(rows, "__len__")


def read_streams(objects: ObjectsByName, trained: int, evaluated: int) -> list[str]:
    """Replace each stream by a list of its first rows, as many as a run uses once each. Return notes."""
    streams = [name for name, rows in objects.items() if is_stream(rows)]
    for name in streams:
        count = evaluated if name.startswith(sources.EVAL_DATASETS) else trained
        objects[name] = [*islice(cast(Iterable[object], objects[name]), count)]
    return [f"{name}: a stream; the run reads its first rows once, at its start" for name in streams]


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
        for setting, title in (("name", sources.TRAIN_DATASET), ("eval_split", sources.EVAL_DATASETS)):
            if entry.get(setting) is not None:
                entry[setting] = take_rows(entry[setting], f"{key}.{setting}", title, objects)
    elif name is not None and not is_name(name):
        if kind not in ("task", "episode"):
            raise ConfigError(f"{key}.name: type {kind} needs a name, such as 'module:object'")
        entry["name"] = name_object(name, object_name(name), objects)
    return entry


def model_settings(model: Any) -> dict[str, str | None]:
    """Return name and revision of a model object's files. Raises ConfigError if it has none, or if a weight differs."""
    name = None if hasattr(model, "peft_config") else getattr(getattr(model, "config", None), "_name_or_path", None)
    if not name:
        rule = "give its folder or name, from which each rank reads its shard, and an adapter as peft_config"
        raise ConfigError(f"model: of type {type(model).__name__}; {rule}")
    if getattr(model.config, "quantization_config", None) is not None:
        raise ConfigError("model: quantized; give its name, and its BitsAndBytesConfig as quantization_config")
    import torch

    from colocated_grpo.policy.checkpoint_files import CheckpointReader, download_model

    revision, folder = None, Path(name)
    if not folder.is_dir():
        revision = getattr(model.config, "_commit_hash", None)
        folder = download_model(generation.ModelConfig(name=name, revision=revision), "model")
    reader = CheckpointReader(folder)
    for weight, parameter in model.named_parameters():
        if weight in reader.shapes:
            stored = torch.empty(reader.shapes[weight], dtype=parameter.dtype)
            reader.read_into(stored, weight, 0)
            if not torch.equal(stored, parameter.detach().cpu()):
                rule = "save the model with save_pretrained(), and give that folder"
                raise ConfigError(f"model: {weight} differs from the files of {name!r}; {rule}")
    return {"name": str(name), "revision": revision}


def with_tokenizer(loaded: config_file.LoadedConfig, given: Any) -> config_file.LoadedConfig:
    """Return the settings with a tokenizer object, saved, if it differs, in a folder named after its contents."""
    from colocated_grpo.policy.model_files import read_tokenizer

    tokenizer, model = getattr(given, "tokenizer", given), loaded.config.model
    if not hasattr(tokenizer, "save_pretrained") or not hasattr(tokenizer, "get_vocab"):
        raise ConfigError(f"processing_class: of type {type(given).__name__}; must be a tokenizer of transformers")
    contents = _contents(tokenizer)
    with suppress(ConfigError):  # the model's folder has no tokenizer
        if contents == _contents(read_tokenizer(model)):
            return loaded
    folder = Path(loaded.config.output_dir).absolute() / "tokenizers" / sha256(contents.encode()).hexdigest()[:12]
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        tokenizer.save_pretrained(partial)
        with suppress(OSError):  # another rank was first
            partial.rename(folder)
        shutil.rmtree(partial, ignore_errors=True)
    config = loaded.config.model_copy(update={"model": model.model_copy(update={"tokenizer": str(folder)})})
    note = f"processing_class: differs from the tokenizer of {model.name}; saved in {folder} and used"
    return config_file.LoadedConfig(config, [*loaded.notes, note])


def _contents(tokenizer: Any) -> str:
    """Return everything that determines prompts and the end of completions as text. Padding is not used."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = {"vocabulary": tokenizer.get_vocab()} if backend is None else json.loads(backend.to_str())
    used = (tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    return json.dumps([state | {"padding": None, "truncation": None}, *used], sort_keys=True, default=str)
