"""What a person reads when a setting is wrong: one line with key, value, rule and place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

KeyPath = tuple[str | int, ...]
"""Where a setting stands: ("environments", 0, "args")."""

SIMILAR = 0.6  # below this likeness a suggestion confuses more than it helps
MISSPELLED = 0.8
"""The same for an old name: what is suggested is the new one, which may look like nothing that was written."""
LONGEST_VALUE = 80


class ConfigError(ValueError):
    """Settings that cannot be run. `str()` is one line for each thing that is wrong."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(" ".join(line.split()) for line in lines))


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value was written."""

    where: str
    """For people: 'line 7 of x.yaml' or 'command line'."""
    on_command_line: bool = False
    text: str | None = None
    """Exactly what stood on the command line."""
    old_name: str | None = None
    """The alias that was used."""

    def __str__(self) -> str:
        return f"{self.where}, as {self.old_name}" if self.old_name else self.where


_WORDS = ((None, "null"), (True, "true"), (False, "false"))


def dotted(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


def path_of(name: str) -> KeyPath:
    """The inverse of `dotted`."""
    return tuple(int(step) if step.isdigit() else step for step in name.split("."))


def show(value: Any) -> str:
    """A value as a person would write it in YAML, cut to a readable length."""
    text = next((word for constant, word in _WORDS if value is constant), repr(value))
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


_RULES = {
    "missing": "required, but not given",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping of settings",
    "model_attributes_type": "must be a mapping of settings",
    "too_short": "needs at least {min_length} entry",
}


def describe(
    error: ErrorDetails,
    tree: Mapping[str, Any],
    origins: Mapping[KeyPath, Origin],
    model: type[BaseModel],
    aliases: Mapping[str, str],
) -> str:
    """One line for one pydantic error. `aliases` maps old names to the new ones that a suggestion should show."""
    path, kind, value = setting_path(error, tree), error["type"], error["input"]
    place = place_of(path, origins)
    if kind == "extra_forbidden":
        return f"{dotted(path)}: unknown key; {suggestion(path, tree, model, aliases)}{place}"
    if kind == "missing":
        return f"{dotted(path)}: {_RULES[kind]}{place}"
    context = {name: _short(bound) for name, bound in error.get("ctx", {}).items()}
    if kind == "union_tag_invalid":
        path, tags = (*path, "type"), context["expected_tags"].replace("'", "")
        return f"{dotted(path)}={show(context['tag'])}: unknown; one of {tags}{place_of(path, origins)}"
    rule = _RULES.get(kind, error["msg"].removeprefix("Value error, ")).format(**context)
    if kind == "string_type" and not isinstance(value, dict | list):
        rule += "; put quotes around it"
    shown = "" if kind == "value_error" and isinstance(value, Mapping) else f"={show(value)}"
    return f"{dotted(path)}{shown}: {rule}{place}"


def _short(bound: Any) -> Any:
    return f"{bound:g}" if isinstance(bound, float) else bound


def setting_path(error: ErrorDetails, tree: Any) -> KeyPath:
    """A pydantic location without the union tags that pydantic puts into it."""
    path: list[str | int] = []
    node = tree
    for step in error["loc"]:
        if isinstance(node, dict) and step not in node and node.get("type") == step:
            continue
        path.append(step)
        if isinstance(node, dict):
            node = node.get(step)
        elif isinstance(node, list) and isinstance(step, int) and step < len(node):
            node = node[step]
    return tuple(path)


def suggestion(path: KeyPath, tree: Mapping[str, Any], model: type[BaseModel], aliases: Mapping[str, str]) -> str:
    """What an unknown key probably meant: the nearest valid name in its own section, then in any."""
    section, key = path[:-1], str(path[-1])
    generic = tuple(0 if isinstance(step, int) else step for step in path)
    owners = [owner for other, owner in setting_names(model) if other == generic]
    if owners:
        return f"it belongs to type {', '.join(tag for owner in owners for tag in _tags(owner))}"
    if "." in key and any(other == path_of(key) for other, _ in setting_names(model)):
        return f"in a file write {_nested(path_of(key))}, in one section with what else is set there"
    candidates = {dotted(other): (str(other[-1]), other[:-1] == generic[:-1]) for other, _ in setting_names(model)}
    scored = [(_likeness(key, leaf) + 0.1 * same, name) for name, (leaf, same) in candidates.items()]
    misspelled = [(max(_likeness(dotted(path), old), _likeness(key, old)), new) for old, new in aliases.items()]
    score, best = max(scored + [(likeness, new) for likeness, new in misspelled if likeness >= MISSPELLED])
    if score >= SIMILAR:
        return f"did you mean {best}?"
    valid = [leaf for leaf, same in candidates.values() if same]
    where = f"in {dotted(section)}" if section else "at the top"
    return f"valid {where}: {', '.join(valid)}" if valid else f"{dotted(section)} is no section"


def _nested(path: KeyPath) -> str:
    """("environments", 0, "name") -> 'environments: [{name: ...}]'."""
    text = "..."
    for step in reversed(path):
        text = f"[{text}]" if isinstance(step, int) else f"{{{step}: {text}}}"
    return text[1:-1]


def setting_names(model: type[BaseModel], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    """Every setting of every union member, with the model that has it; index 0 stands for any list entry."""
    for name, field in model.model_fields.items():
        yield (*prefix, name), model
        inside = (*prefix, name, 0) if get_origin(field.annotation) is list else (*prefix, name)
        for section in sections(field.annotation):
            yield from setting_names(section, inside)


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The settings models named in an annotation, through unions, lists and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in sections(part)]


def _tags(model: type[BaseModel]) -> tuple[str, ...]:
    return get_args(model.model_fields["type"].annotation)


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def place_of(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> str:
    """' (line 7 of x.yaml)', of the key itself or of what encloses it: a missing key has no line of its own."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return f" ({origins[path[:length]]})"
    return ""
