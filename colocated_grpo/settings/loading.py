"""Loads a Config from a YAML file and command-line overrides."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from colocated_grpo.settings.aliases import new_names, translate_aliases
from colocated_grpo.settings.beside import find_beside
from colocated_grpo.settings.errors import (
    ConfigError,
    KeyPath,
    SettingLocation,
    SettingsTree,
    dotted,
    error_lines,
    errors_by_path,
    location_suffix,
    parse_path,
    show,
)
from colocated_grpo.settings.rules import check, remarks
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.tree import assign, lookup
from colocated_grpo.settings.yaml_text import parse_document, parse_value

DEFAULT_TASK = "arithmetic"
"""Task of a config file without environments. Its prompts are generated, so nothing is downloaded."""
SHIPPED = Path("training_configs")
"""Folder of the configs that come with the package: in a checkout, and where that is not the working folder in
_INSTALLED."""
_INSTALLED = Path(__file__).parents[1] / SHIPPED
LISTS = {
    "policy.lora.target_modules",
    "policy.lora.exclude_modules",
    "lora_target_modules",
    "report_to",
    "reward_funcs",
    "reward_weights",
}
"""Flags that accept several values on the command line, as those of TRL and Atropos do: `--report_to wandb none`."""
SWITCHES = {"use_peft", "use_rslora", "use_wandb"}
"""Flags that mean true without a value, as in TRL and Atropos."""
MODEL_NAME = ("model", "name")
"""The setting that `model: NAME` and `--model NAME` set."""


@dataclass(frozen=True)
class LoadedConfig:
    config: Config
    notes: list[str]
    """Lines to show to the user: translated names, defaults filled in, settings with side effects."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the settings of a run, validated. Raises ConfigError with one line per problem."""
    return read_config(path, overrides).config


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Return the settings, like `load_config`, and notes about them. Files are named as in the working folder.

    Overrides are command-line arguments: ["--policy.lr", "2e-6", "--engine.sleep=false"].
    """
    path = _shipped(Path(path))
    return _complete(
        *_read_file(path),
        path.parent,
        [
            (key, parse_value(text), SettingLocation(where="command line", on_command_line=True, text=text))
            for key, text in parse_overrides(overrides)
        ],
    )


def build_config(
    path: str | Path | None, settings: Mapping[KeyPath, Any], defaults: Mapping[str, Any] = {}
) -> LoadedConfig:
    """Return the settings of a file, if one is given, overridden by those of a program, and notes about them.

    defaults: top-level settings where neither has them, in place of the schema's.
    """
    location = SettingLocation(where="argument", on_command_line=True)
    path = None if path is None else _shipped(Path(path))
    tree, locations = ({}, {}) if path is None else _read_file(path)
    folder = Path() if path is None else path.parent
    return _complete(tree, locations, folder, [(key, value, location) for key, value in settings.items()], defaults)


def _shipped(path: Path) -> Path:
    """Return the config of this name that comes with the package if training_configs/NAME is no file here."""
    installed = _INSTALLED / path.name
    return installed if path.parent == SHIPPED and not path.exists() and installed.is_file() else path


def _read_file(path: Path) -> tuple[SettingsTree, dict[KeyPath, SettingLocation]]:
    tree, lines = parse_document(_read_text(path), path.name)
    locations = {key: SettingLocation(where=f"line {line} of {path.name}") for key, line in lines.items()}
    if isinstance(name := tree.get("model"), str):
        tree["model"] = {"name": name}
        # A key merged by a YAML anchor has no line of its own.
        locations[MODEL_NAME] = locations.get(MODEL_NAME[:1], SettingLocation(where=path.name))
    return tree, locations


def _complete(
    tree: SettingsTree,
    locations: dict[KeyPath, SettingLocation],
    folder: Path,
    overrides: Sequence[tuple[KeyPath, Any, SettingLocation]],
    defaults: Mapping[str, Any] = {},
) -> LoadedConfig:
    """Apply the overrides, translate old names, fill in defaults and validate. Changes `tree` and `locations`.

    folder: of the config file, in which files are looked up too.
    """
    for key, value, location in overrides:
        if key == MODEL_NAME[:1] and isinstance(value, str):
            key = MODEL_NAME
        assign(tree, key, value)
        locations[key] = location
    notes = translate_aliases(tree, locations)
    for name, value in defaults.items():
        tree.setdefault(name, value)
    notes += _fill_in_defaults(tree)
    config = _validate(tree, locations)
    if find_beside(config, tree, locations, folder):
        config = _validate(tree, locations)
    check(config)
    return LoadedConfig(config, notes + remarks(config))


def parse_overrides(arguments: Sequence[str]) -> list[tuple[KeyPath, str]]:
    """Parse arguments: ["--a.b", "1", "--c.0=x"] -> [(("a", "b"), "1"), (("c", 0), "x")]."""
    pairs: list[tuple[KeyPath, str]] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, has_value, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not all(name.split(".")):
            raise ConfigError(f"{argument!r}: expected --section.key VALUE")
        # `--training-steps` is accepted as well. Only the first part is converted: keys of `args` may have hyphens.
        section, dot, rest = name.partition(".")
        key = section.replace("-", "_") + dot + rest
        if not has_value:
            values = [remaining.pop(0) for _ in range(_number_of_values(key, remaining))]
            if not values and key not in SWITCHES:
                raise ConfigError(f"--{name}: needs a value, for example --{name} VALUE or --{name}=VALUE")
            text = values[0] if len(values) == 1 else json.dumps(values) if values else "true"
        pairs.append((parse_path(key), text))
    return pairs


def _number_of_values(key: str, arguments: Sequence[str]) -> int:
    """Return how many of `arguments` are values of the flag before them."""
    following = next((index for index, text in enumerate(arguments) if text.startswith("--")), len(arguments))
    return following if key in LISTS else min(following, 1)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        shipped = SHIPPED / path.name
        near = f"; did you mean {shipped}?" if shipped.is_file() or _shipped(shipped) != shipped else ""
        raise ConfigError(f"config='{path}': no such file{near}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config='{path}': not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"config='{path}': cannot be read ({error.strerror})") from None


def _fill_in_defaults(tree: SettingsTree) -> list[str]:
    """Add missing `type` keys and, if `environments` is missing, the default task, in place. Return notes."""
    notes = []
    if "environments" not in tree:
        tree["environments"] = [{"name": DEFAULT_TASK}]
        notes.append(f"environments: not given; training on the built-in task {DEFAULT_TASK!r}")
    if isinstance(tree["environments"], list):
        for environment in tree["environments"]:
            if isinstance(environment, dict):
                environment.setdefault("type", "task")
    if isinstance(tree.get("loss"), dict):
        tree["loss"].setdefault("type", Config.model_fields["loss"].default.type)
    return notes


def _reject_booleans_as_numbers(tree: SettingsTree, config: Config, locations: dict[KeyPath, SettingLocation]) -> None:
    # pydantic converts true to 1, so `training_steps: true` would train for one step.
    not_boolean = [path for path, value in _leaves(config) if not isinstance(value, bool)]
    wrong = {path: value for path in not_boolean if isinstance(value := lookup(tree, path), bool)}
    if wrong:
        raise ConfigError(
            *(
                f"{dotted(path)}={show(value)}: must be a number{location_suffix(path, locations)}"
                for path, value in wrong.items()
            )
        )


def _leaves(section: BaseModel, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every setting in `section` and the sections below it."""
    for name, value in section:
        path = (*prefix, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, path)
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                yield from _leaves(entry, (*path, index)) if isinstance(entry, BaseModel) else [((*path, index), entry)]
        else:
            yield path, value


def _validate(tree: SettingsTree, locations: dict[KeyPath, SettingLocation]) -> Config:
    try:
        config = Config.model_validate(tree)
    except ValidationError as invalid:
        errors = invalid.errors(include_url=False)
    else:
        _reject_booleans_as_numbers(tree, config, locations)
        return config
    # `--run_name 2024` was parsed as a number. Where a field needs text, use the command line's text unparsed.
    by_path = errors_by_path(errors, tree)
    needs_text = [path for path, found in by_path.items() if any(error["type"] == "string_type" for error in found)]
    texts = {path: locations[path].text for path in needs_text if path in locations}
    texts = {path: text for path, text in texts.items() if text is not None}
    if texts:
        for path, text in texts.items():
            assign(tree, path, text)
            locations[path] = replace(locations[path], text=None)
        return _validate(tree, locations)
    raise ConfigError(*error_lines(errors, tree, locations, Config, new_names()))
