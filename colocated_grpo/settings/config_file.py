"""Loads a Config from a YAML file and command-line overrides."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from colocated_grpo.settings import errors, rules
from colocated_grpo.settings.base import ConfigFolder
from colocated_grpo.settings.errors import ConfigError, KeyPath, Locations, SettingLocation, SettingsTree
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.tree import assign, copy_nested, parse_document, parse_value

DEFAULT_TASK = "arithmetic"
"""Task of a config file without environments. Its prompts are generated, so nothing is downloaded."""
SHIPPED = Path("training_configs")
"""Folder of the packaged configs, relative to a checkout. Outside a checkout, the configs are read from _INSTALLED."""
_INSTALLED = Path(__file__).parents[1] / SHIPPED
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
    """Return the settings and notes about them. overrides: command-line arguments, such as ["--policy.lr", "2e-6"]."""
    location = SettingLocation(where="command line", on_command_line=True)
    given = [(key, parse_value(text), replace(location, text=text)) for key, text in parse_overrides(overrides)]
    return _complete(path, given, {})


def build_config(
    path: str | Path | None, settings: Mapping[KeyPath, object], defaults: Mapping[str, object] = {}
) -> LoadedConfig:
    """Return the settings of an optional file and of a program, which take precedence, and notes about them.

    defaults: top-level settings that replace the schema's defaults.
    """
    location = SettingLocation(where="argument", on_command_line=True)
    return _complete(path, [(key, value, location) for key, value in settings.items()], defaults)


def _shipped(path: Path) -> Path:
    """Return the packaged config for training_configs/NAME if the working folder has no such file."""
    installed = _INSTALLED / path.name
    return installed if path.parent == SHIPPED and not path.exists() and installed.is_file() else path


def _read_file(path: Path) -> tuple[SettingsTree, Locations]:
    if path.suffix == ".toml":
        raise ConfigError(f"config={str(path)!r}: TOML; a config is YAML, for example model: {{name: Qwen/Qwen3-0.6B}}")
    tree, lines = parse_document(_read_text(path), str(path))
    locations = {key: SettingLocation(where=f"line {line} of {path.name}") for key, line in lines.items()}
    if isinstance(name := tree.get("model"), str):
        tree["model"] = {"name": name}
        # A key merged by a YAML anchor has no line of its own.
        locations[MODEL_NAME] = locations.get(MODEL_NAME[:1], SettingLocation(where=path.name))
    return tree, locations


def _complete(
    path: str | Path | None,
    overrides: Sequence[tuple[KeyPath, object, SettingLocation]],
    defaults: Mapping[str, object],
) -> LoadedConfig:
    """Read the file, if any, apply the overrides, translate old names, fill in defaults and validate."""
    file = Path() if path is None else _shipped(Path(path))
    tree, locations = ({}, {}) if path is None else _read_file(file)
    for key, value, location in overrides:
        if key == MODEL_NAME[:1] and isinstance(value, str):
            key = MODEL_NAME
        assign(tree, key, copy_nested(value))  # translation changes `tree`
        for replaced in [other for other in locations if other[: len(key)] == key]:
            del locations[replaced]
        locations[key] = location
    notes: list[str] = []
    if not tree.keys() <= Config.model_fields.keys():  # names of other trainers: only then their tables are read
        from colocated_grpo.settings.names.translation import translate_names

        notes = translate_names(tree, locations)
    for name, value in defaults.items():
        tree.setdefault(name, value)
    notes += _fill_in_defaults(tree)
    typed = frozenset(text for _, value, _ in overrides for text in _texts(value))
    config = _validate(tree, locations, ConfigFolder(file.parent, typed))
    rules.check(config)
    return LoadedConfig(config, notes + rules.remarks(config))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def parse_overrides(arguments: Sequence[str]) -> list[tuple[KeyPath, str]]:
    """Parse arguments: ["--a.b", "1", "--c.0=x"] -> [(("a", "b"), "1"), (("c", 0), "x")]."""
    pairs: list[tuple[KeyPath, str]] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, has_value, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not all(name.split(".")):
            rule = "expected --section.key VALUE"
            if has_value and not argument.startswith("-"):
                rule += "; for overrides of Hydra, such as verl's: docs/guides/from_verl.md"
            raise ConfigError(f"{argument!r}: {rule}")
        # `--training-steps` means `--training_steps`. Hyphens after the first dot are kept, as in keys of `args`.
        section, dot, rest = name.partition(".")
        key = section.replace("-", "_") + dot + rest
        if not has_value:
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"--{name}: needs a value, for example --{name} VALUE or --{name}=VALUE")
            text = remaining.pop(0)
        pairs.append((errors.parse_path(key), text))
    return pairs


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
    """Add missing `type` keys in place, and the default task if `environments` is missing. Return notes."""
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


def _validate(tree: SettingsTree, locations: Locations, context: ConfigFolder) -> Config:
    try:
        return Config.model_validate(tree, context=context)
    except ValidationError as invalid:
        found = invalid.errors(include_url=False)
    # `--run_name 2024` was parsed as a number. If a field needs text, use the unparsed text of the command line.
    by_path = errors.errors_by_path(found, tree)
    needs_text = [path for path, own in by_path.items() if any(error["type"] == "string_type" for error in own)]
    texts = {path: locations[path].text for path in needs_text if path in locations}
    texts = {path: text for path, text in texts.items() if text is not None}
    if texts:
        for path, text in texts.items():
            assign(tree, path, text)
            locations[path] = replace(locations[path], text=None)
        return _validate(tree, locations, context)
    from colocated_grpo.settings.names.translation import new_names

    raise ConfigError(*errors.error_lines(found, tree, locations, Config, new_names()))
