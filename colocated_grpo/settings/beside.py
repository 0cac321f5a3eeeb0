"""Finds files that a config names: in the working folder, or beside the config file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from colocated_grpo.settings.errors import ConfigError, KeyPath, SettingLocation, SettingsTree, dotted, location_suffix
from colocated_grpo.settings.inputs import DATA_SUFFIXES, is_inline
from colocated_grpo.settings.lora import DEFAULT_INIT
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import (
    AgentSourceConfig,
    DatasetSourceConfig,
    EnvironmentConfig,
    RowsSourceConfig,
    prompt_functions,
)
from colocated_grpo.settings.tree import assign, lookup
from colocated_grpo.settings.turns import INITIAL, TurnsSourceConfig


def find_beside(config: Config, tree: SettingsTree, locations: Mapping[KeyPath, SettingLocation], folder: Path) -> bool:
    """Replace names in `tree` that exist beside the config file, in `folder`, but not in the working folder.

    The new name is what a user would write in the working folder. Names on the command line are left as they are.
    Returns whether a name was replaced. Raises ConfigError for names of two different files.
    """
    found = {}
    lines = []
    for path, name in _file_names(config, tree):
        file, separator, wanted = _split(name)
        beside = folder / file
        if _on_command_line(path, locations) or Path(file).is_absolute() or not os.path.exists(beside):
            continue
        if not os.path.exists(file):
            found[path] = f"{beside}{separator}{wanted}"
        elif not beside.samefile(file):
            lines.append(
                f"{dotted(path)}={name!r}: both {Path.cwd() / file} and {beside.absolute()} (beside the config) exist; "
                f"write the absolute path of one{location_suffix(path, locations)}"
            )
    if lines:
        raise ConfigError(*lines)
    for path, name in found.items():
        section = path[:-1]  # a reward may be given as its name alone
        assign(tree, section if isinstance(lookup(tree, section), str) else path, name)
    return bool(found)


def _file_names(config: Config, tree: SettingsTree) -> Iterator[tuple[KeyPath, str]]:
    """Yield every setting that may name a file or a folder to read."""
    yield ("model", "name"), config.model.name
    template = config.model.chat_template
    if template is not None and not is_inline(template):
        yield ("model", "chat_template"), template
    lora = config.policy.lora
    if lora is not None and lora.init != DEFAULT_INIT:
        yield ("policy", "lora", "init"), lora.init
    for index, source in enumerate(config.environments):
        for path, name in _names_of(source):
            yield ("environments", index, *path), name
    for index, entry in enumerate(config.evaluation.sets):
        start: KeyPath = ("evaluation", "sets", index)
        short = lookup(tree, (*start, "rewards")) is not None  # of the set, and moved into its source
        for path, name in _names_of(entry.source):
            yield (*start, *path) if short and path[0] == "rewards" else (*start, "source", *path), name
        if entry.answer is not None and _names_code(entry.answer):
            yield (*start, "answer"), entry.answer


def _names_of(source: EnvironmentConfig) -> Iterator[tuple[KeyPath, str]]:
    for path, name in prompt_functions(source):
        if _names_code(name):
            yield path, name
    if isinstance(source, RowsSourceConfig):
        yield ("name",), source.name
        if source.eval_split is not None and source.eval_split.lower().endswith(DATA_SUFFIXES):
            yield ("eval_split",), source.eval_split
    if isinstance(source, AgentSourceConfig):
        if shutil.which(source.program) is None:  # a command in PATH is no file name
            yield ("program",), source.program
    elif isinstance(source, DatasetSourceConfig):
        for number, reward in enumerate(source.rewards):
            if _names_code(reward.name):
                yield ("rewards", number, "name"), reward.name
    elif _names_code(source.name):
        yield ("name",), source.name
    if isinstance(source, TurnsSourceConfig) and source.opponent is not None and source.opponent.name != INITIAL:
        yield ("opponent", "name"), source.opponent.name


def _names_code(name: str) -> bool:
    return name.rpartition(":")[0].endswith(".py")


def _split(name: str) -> tuple[str, str, str]:
    """Split 'path/to/file.py:object' into file, colon and object. Any other name is a file."""
    if not _names_code(name):
        return name, "", ""
    file, separator, wanted = name.rpartition(":")
    return os.path.expanduser(file), separator, wanted


def _on_command_line(path: KeyPath, locations: Mapping[KeyPath, SettingLocation]) -> bool:
    written = (path[:length] for length in range(len(path), 0, -1) if path[:length] in locations)
    return (nearest := next(written, None)) is not None and locations[nearest].on_command_line
