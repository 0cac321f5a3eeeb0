"""The command `colocated-grpo atropos`: command lines of Atropos' example trainer, translated into a run's settings.

The flags are rows of `settings.names.atropos_flags`. Settings that none of them sets are in atropos_command.yaml.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from colocated_grpo.settings.errors import ConfigError, sections
from colocated_grpo.settings.names.atropos_flags import FLAGS, Flag
from colocated_grpo.settings.names.atropos_meanings import Command, Meaning
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.tree import parse_value

BASE = Path(__file__).with_suffix(".yaml")
MODEL = "--model-name"
_TYPES: dict[str, Callable[[str], Any]] = {"text": str, "int": int, "float": float, "words": str}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add Atropos' flags to the launcher's. A flag that is not given leaves no attribute."""
    parser.prog += " atropos"
    parser.description = "Run a command line of Atropos' example trainer: docs/guides/from_atropos.md."
    group = parser.add_argument_group("flags of Atropos' example trainer")
    for flag in FLAGS:
        options: dict[str, Any] = {"dest": flag.names[0], "default": argparse.SUPPRESS, "help": _help(flag)}
        if flag.kind == "switch":
            options["action"] = "store_true"
        else:
            options |= {"type": _TYPES[flag.kind], "choices": flag.choices, "metavar": _metavar(flag)}
        if flag.kind == "words":
            options["nargs"] = "+"
        group.add_argument(*flag.names, **options)


def _help(flag: Flag) -> str:
    return (
        flag.help if flag.default is None or flag.default is False else f"{flag.help} (default: {_text(flag.default)})"
    )


def _metavar(flag: Flag) -> str:
    return "{" + ",".join(flag.choices) + "}" if flag.choices else {"int": "N", "float": "X"}.get(flag.kind, "TEXT")


def read_command(
    arguments: Sequence[str],
    parser: argparse.ArgumentParser,
    environment: Mapping[str, str],
    visible_gpus: Callable[[Mapping[str, str]], int],
) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the launcher's flags, overrides of settings (the user's own last), and lines to print.

    parser: the launcher's; Atropos' flags are added to it. Raises ConfigError with one line per problem.
    """
    add_flags(parser)
    options, rest = parser.parse_known_args(arguments)
    if options.config is not None:
        raise ConfigError(f"--config={options.config}: not used by this command; add settings as --section.key VALUE")
    _reject_unknown_flags(rest, parser)
    command = Command(
        given={flag.names[0]: getattr(options, flag.names[0]) for flag in FLAGS if hasattr(options, flag.names[0])},
        defaults={flag.names[0]: flag.default for flag in FLAGS},
        overrides=rest,
        environment=environment,
        gpus=visible_gpus(environment) if options.gpus is None else options.gpus,
        gpus_chosen=options.gpus is not None,
    )
    if MODEL not in command.given:
        raise ConfigError(f"{MODEL}: required: a folder or the name of a model on the Hugging Face Hub")
    settings: dict[str, Any] = {}
    launcher: dict[str, Any] = {"config": str(BASE)}
    notes: list[str] = []
    for flag, meaning in _meanings(command):
        settings |= meaning.settings
        launcher |= meaning.launcher
        notes += _notes(flag, meaning, command)
    for name, value in launcher.items():
        if getattr(options, name) == parser.get_default(name):  # the user's own flag takes precedence
            setattr(options, name, value)
    overrides = [word for key, value in settings.items() for word in (f"--{key}", _text(value))]
    return options, [*overrides, *rest], notes


def _meanings(command: Command) -> list[tuple[Flag, Meaning]]:
    """Return the meaning of every flag. Raises ConfigError with a line for each flag whose value is invalid."""
    found, problems = [], []
    for flag in FLAGS:
        value = command.value(flag.names[0])
        try:
            found.append((flag, flag.meaning(value, command)))
        except ValueError as rule:
            problems.append(f"{flag.names[0]}={_text(value)}: {rule}")
    if problems:
        raise ConfigError(*problems)
    return found


def _notes(flag: Flag, meaning: Meaning, command: Command) -> list[str]:
    name = flag.names[0]
    shown = name if flag.kind == "switch" else f"{name} {_text(command.value(name))}"
    given = meaning.note if name in command.given else ""
    lines = (("note", given), ("note", meaning.remark), ("warning", meaning.warning))
    return [f"{kind}: {shown}: {text}" for kind, text in lines if text]


def _reject_unknown_flags(arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise ConfigError for a flag that is neither Atropos', nor the launcher's, nor a setting of this project."""
    flags = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    settings = [f"--{name}" for name, field in Config.model_fields.items() if not sections(field.annotation)]
    unknown = [
        name
        for argument in arguments
        if (name := argument.partition("=")[0]).startswith("--")
        and "." not in name
        and f"--{name[2:].replace('-', '_')}" not in settings
    ]
    lines = []
    for name in unknown:
        [near] = get_close_matches(name.replace("_", "-"), [*flags, *settings], n=1, cutoff=0.0)
        lines.append(f"{name}: unknown flag; did you mean {near}?")
    if lines:
        raise ConfigError(*lines)


def _text(value: Any) -> str:
    """Return a value as an argument that is read as the same value."""
    if isinstance(value, str) and parse_value(value) == value:
        return value
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else json.dumps(value)
