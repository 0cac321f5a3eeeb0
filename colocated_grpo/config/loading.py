"""YAML file and command-line overrides -> Config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from colocated_grpo.config.aliases import new_names, translate_aliases
from colocated_grpo.config.errors import (
    ConfigError,
    KeyPath,
    Origin,
    describe,
    dotted,
    path_of,
    place_of,
    setting_path,
    show,
)
from colocated_grpo.config.rules import check, remarks
from colocated_grpo.config.schema import Config
from colocated_grpo.config.tree import lookup, place
from colocated_grpo.config.yaml_text import parse_document, parse_value

# What a file without environments trains on: procedural, so that it needs no download.
DEFAULT_TASK = "arithmetic"
SHIPPED = Path("training_configs")
MODEL_NAME = ("model", "name")
"""What a model given as plain text, in the file or as --model, is."""


@dataclass(frozen=True)
class LoadedConfig:
    config: Config
    notes: list[str]
    """Lines for the person who starts the run: old names that were used, settings that deserve a word."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The settings of a run, checked. Raises ConfigError, one line for each thing that is wrong."""
    return read_config(path, overrides).config


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """As `load_config`, with notes. Overrides as on a command line: ["--policy.lr", "2e-6", "--engine.sleep=false"]."""
    path = Path(path)
    tree, lines = parse_document(_read_text(path), path.name)
    origins = {key: Origin(where=f"line {line} of {path.name}") for key, line in lines.items()}
    if isinstance(name := tree.get("model"), str):
        tree["model"] = {"name": name}
        origins[MODEL_NAME] = origins.get(MODEL_NAME[:1], Origin(where=path.name))  # merged by a YAML anchor: no line
    for key, text in parse_overrides(overrides):
        value = parse_value(text)
        if key == MODEL_NAME[:1] and isinstance(value, str):
            key = MODEL_NAME
        place(tree, key, value)
        origins[key] = Origin(where="command line", on_command_line=True, text=text)
    notes = translate_aliases(tree, origins)
    notes += _fill_in(tree)
    config = _validate(tree, origins)
    check(config)
    return LoadedConfig(config, notes + remarks(config))


def parse_overrides(arguments: Sequence[str]) -> list[tuple[KeyPath, str]]:
    """["--a.b", "1", "--c.0=x"] -> [(("a", "b"), "1"), (("c", 0), "x")]."""
    pairs: list[tuple[KeyPath, str]] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, has_value, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not all(name.split(".")):
            raise ConfigError(f"{argument!r}: expected --section.key VALUE")
        if not has_value:
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"--{name}: needs a value, for example --{name} VALUE or --{name}=VALUE")
            text = remaining.pop(0)
        # `--training-steps`, as flags are written elsewhere; only in the first word, as keys of free-form sections may
        # have hyphens
        section, dot, rest = name.partition(".")
        pairs.append((path_of(section.replace("-", "_") + dot + rest), text))
    return pairs


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        shipped = SHIPPED / path.name
        near = f"; did you mean {shipped}?" if shipped.is_file() else ""
        raise ConfigError(f"config='{path}': no such file{near}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config='{path}': not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"config='{path}': cannot be read ({error.strerror})") from None


def _fill_in(tree: dict[str, Any]) -> list[str]:
    """Union tags that have a default, and an environment where the file names none."""
    notes = []
    if "environments" not in tree:
        tree["environments"] = [{"name": DEFAULT_TASK}]
        notes.append(f"environments: none given; training on the built-in task {DEFAULT_TASK!r}")
    if isinstance(tree["environments"], list):
        for environment in tree["environments"]:
            if isinstance(environment, dict):
                environment.setdefault("type", "task")
    if isinstance(tree.get("loss"), dict):
        tree["loss"].setdefault("type", Config.model_fields["loss"].default.type)
    return notes


def _refuse_true_as_one(tree: dict[str, Any], config: Config, origins: dict[KeyPath, Origin]) -> None:
    # pydantic turns true into 1, so `training_steps: true` would train for one step
    not_boolean = [path for path, value in _leaves(config) if not isinstance(value, bool)]
    wrong = {path: value for path in not_boolean if isinstance(value := lookup(tree, path), bool)}
    if wrong:
        rule = "must be a number"
        raise ConfigError(*(f"{dotted(path)}={show(wrong[path])}: {rule}{place_of(path, origins)}" for path in wrong))


def _leaves(section: BaseModel, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every setting below `section` that is no section itself."""
    for name, value in section:
        path = (*prefix, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, path)
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                yield from _leaves(entry, (*path, index)) if isinstance(entry, BaseModel) else [((*path, index), entry)]
        else:
            yield path, value


def _validate(tree: dict[str, Any], origins: dict[KeyPath, Origin]) -> Config:
    try:
        config = Config.model_validate(tree)
    except ValidationError as invalid:
        errors = invalid.errors(include_url=False)
    else:
        _refuse_true_as_one(tree, config, origins)
        return config
    # `--run_name 2024` means the text: where a field wants text, take the command line's words as they stand
    literal = {setting_path(error, tree) for error in errors if error["type"] == "string_type"}
    words = {path: origins[path].text for path in literal if path in origins and origins[path].text is not None}
    if words:
        for path, text in words.items():
            place(tree, path, text)
            origins[path] = replace(origins[path], text=None)
        return _validate(tree, origins)
    raise ConfigError(*(describe(error, tree, origins, Config, new_names()) for error in errors))
