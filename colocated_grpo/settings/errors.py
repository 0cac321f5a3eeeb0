"""Settings in text: error lines, and masks of secret values.

An error line has the key, its value, the violated rule and where the value was written. Keys, tokens and passwords are
masked in settings that are shown or logged. The name of a setting determines whether the setting is secret. Keys of
common services are also found in other text, as are logins, keys and webhook addresses in URLs.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from colocated_grpo.errors import ConfigError as ConfigError
from colocated_grpo.errors import shortened
from colocated_grpo.types import JsonObject

MASK = "***"
_SECRET = re.compile(
    r"(api_?key|secret|password|passwd|passphrase|credentials?|authorization|cookie)$"
    r"|(^|[_.-])(key|token|auth|bearer|jwt|pat|webhook(_url)?)$",
    re.IGNORECASE,
)
_OF_TOKENIZERS = re.compile(r"(bos|eos|pad|unk|mask|cls|sep|stop|start|end|image|special)_token$", re.IGNORECASE)
_IN_TEXT = (
    re.compile(r"(://)[^/@\s]+(?=@)"),
    re.compile(r"(https?://\S*?hooks?\b[^/\s]*/)\S+"),
    re.compile(r"([?&]\w*(?:key|token|secret|sig|signature|password)=)[^&#\s]+", re.IGNORECASE),
    re.compile(r"\b(Bearer |Basic )\S+"),
    re.compile(  # AWS, OpenAI and Anthropic, Hugging Face, GitHub, GitLab, Slack, Google, JSON web tokens
        r"\b()(?:A[KS]IA[0-9A-Z]{16}|sk-[\w-]{20,}|hf_\w{20,}|gh[a-z]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
        r"|xox[a-z]-[\w-]{10,}|AIza[\w-]{35}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
    ),
)
"""Secrets in text. The first group is shown."""


def is_secret(name: str) -> bool:
    """Return True if a setting with this dotted name is a secret: args.api_key, hf_token, credentials.user."""
    return any(_SECRET.search(part) and not _OF_TOKENIZERS.search(part) for part in name.split("."))


def masked(value: object, name: str = "") -> object:
    """Return a setting with all secrets in it masked. name: name of the setting, or of the list that contains it."""
    if is_secret(name) and value and isinstance(value, str | dict | list):
        return MASK
    if isinstance(value, dict):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item, name) for item in value]
    if isinstance(value, str):
        for pattern in _IN_TEXT:
            value = pattern.sub(rf"\1{MASK}", value)
    return value


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments with secrets masked, also inside values that are YAML mappings or lists."""
    result, name = [], ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            result.append(f"{name}={_masked_text(value, name)}" if equals else name)
            name = "" if equals else name
        else:
            result.append(_masked_text(argument, name))
            name = ""
    return result


def _masked_text(text: str, name: str) -> str:
    if text.lstrip()[:1] in ("{", "["):
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):  # also a number of too many digits, or deep nesting
            return MASK
        hidden = masked(value, name.removeprefix("--"))
        return text if hidden == value else json.dumps(hidden)
    return str(masked(text, name.removeprefix("--")))


KeyPath = tuple[str | int, ...]
"""Path of a setting. Example: ("environments", 0, "args")."""
SettingsTree = JsonObject
"""Settings as plain nested data, before they are validated."""

MIN_SIMILARITY = 0.7
"""Minimum similarity of a suggested name to an unknown key. Less similar names would confuse more than help."""
MIN_ALIAS_SIMILARITY = 0.8
"""The same for an alias. It is higher, because the suggestion shows the new name, which may not resemble the key."""
SAME_SECTION_BONUS = 0.1
MAX_VALUE_CHARACTERS = 80


@dataclass(frozen=True, kw_only=True)
class SettingLocation:
    """Place where a setting was written. `str()` returns the text shown in error lines."""

    where: str
    """'line 7 of x.yaml' or 'command line'."""
    on_command_line: bool = False
    text: str | None = None
    """The value as typed on the command line, before YAML parsing."""
    old_name: str | None = None
    """The alias that was used, or None."""

    def __str__(self) -> str:
        return f"{self.where}, as {self.old_name}" if self.old_name else self.where


def dotted(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


def parse_path(name: str) -> KeyPath:
    """Parse a dotted name into a path. Inverse of `dotted`."""
    return tuple(int(step) if step.isdigit() else step for step in name.split("."))


def show(value: object) -> str:
    """Return a value as written in YAML, cut to `MAX_VALUE_CHARACTERS`."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return shortened(text, MAX_VALUE_CHARACTERS)


Locations = dict[KeyPath, SettingLocation]

_RULES = {
    "missing": "required, but not given",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    **dict.fromkeys(("model_type", "model_attributes_type"), "must be a mapping of settings"),
    "union_tag_not_found": "needs {discriminator}",
    "string_pattern_mismatch": "must match {pattern}",
    "too_short": "needs at least {min_length} entry",
}
"""Maps pydantic's error types to rules. Of other types, pydantic's message is the rule."""


def error_lines(
    errors: Sequence[ErrorDetails],
    tree: SettingsTree,
    locations: Locations,
    model: type[BaseModel],
    aliases: dict[str, str],
) -> list[str]:
    """Return one line for each setting with pydantic errors. aliases: old names -> names shown in suggestions.

    A setting with a union type has one pydantic error for each member of the union. Its line joins their rules.
    """
    lines, by_path = [], errors_by_path(errors, tree)
    unknown = [path for path, found in by_path.items() if found[0]["type"] == "extra_forbidden"]
    advice = {path: suggestion(path, tree, model, aliases) for path in unknown}
    for path, found in by_path.items():
        kind, value, context = found[0]["type"], found[0]["input"], found[0].get("ctx", {})
        if kind == "missing" and f"did you mean {dotted(path)}?" in advice.values():
            continue  # misspelt, which is one mistake
        if kind == "extra_forbidden":
            line = f"{dotted(path)}: unknown key; {advice[path]}"
        elif kind == "union_tag_invalid":
            tags = str(context["expected_tags"]).replace("'", "")
            line = f"{dotted(path)}={show(context['tag'])}: must be one of {tags}"
            if path == ("loss", "type") and "distil" in str(context["tag"]).lower():
                line += "; for distillation, name the teacher in loss.kl.model: docs/guides/distillation.md"
        else:
            hidden = kind == "missing" or (kind == "value_error" and isinstance(value, Mapping))
            line = f"{dotted(path)}{'' if hidden else f'={show(value)}'}: {_rule(found[0])}"
        rules = [_rule(error).removeprefix("must be ") for error in found[1:]]
        rules = [rule for rule in rules if not line.endswith(rule)]
        lines.append(" or ".join([line, *rules]) + location_suffix(path, locations))
    return lines


def errors_by_path(errors: Sequence[ErrorDetails], tree: Mapping[str, object]) -> dict[KeyPath, list[ErrorDetails]]:
    """Return the errors of each setting. If a list entry has errors, errors of the list itself are omitted."""
    found: dict[KeyPath, list[ErrorDetails]] = {}
    for error in errors:
        found.setdefault(setting_path(error, tree), []).append(error)
    lists = {path[:length] for path in found for length in range(len(path))}
    return {path: found[path] for path in found if path not in lists}


def _rule(error: ErrorDetails) -> str:
    kind = error["type"]
    bounds = error.get("ctx", {}).items()
    context = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in bounds}
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    rule = _RULES[kind].format(**context) if kind in _RULES else message
    if rule == _RULES["model_type"] and error["loc"] == ("model",):
        rule = "must be a name, or a mapping of settings"
    if kind == "string_type" and not isinstance(error["input"], dict | list):
        rule += "; write FILE.py:NAME" if callable(error["input"]) else "; put quotes around it"
    return rule


def setting_path(error: ErrorDetails, tree: object) -> KeyPath:
    """Return the path of the setting with a pydantic error. Pydantic's union tags are removed from the path."""
    path: list[str | int] = []
    node = tree
    for step in error["loc"]:
        if isinstance(node, dict):
            is_tag = step not in node and (node.get("type") == step or error["type"] != "missing")
        else:
            is_tag = isinstance(step, str)  # tag of a union of plain types, such as list[str]
        if is_tag:
            continue
        path.append(step)
        if isinstance(node, dict):
            node = node.get(step)
        elif isinstance(node, list) and isinstance(step, int) and step < len(node):
            node = node[step]
    return (*path, "type") if error["type"] == "union_tag_invalid" else tuple(path)


def suggestion(path: KeyPath, tree: Mapping[str, object], model: type[BaseModel], aliases: Mapping[str, str]) -> str:
    """Return advice for an unknown key: the most similar name (elsewhere the same), or all names of its section."""
    section, key = path[:-1], str(path[-1])
    generic = tuple(0 if isinstance(step, int) else step for step in path)
    owners = [owner for other, owner in setting_names(model) if other == generic]
    if owners:
        tags = [tag for owner in owners for tag in get_args(owner.model_fields["type"].annotation)]
        return f"valid only for type {', '.join(tags)}"
    if "." in key and any(other == parse_path(key) for other, _ in setting_names(model)):
        return f"dotted names work on the command line only; in a file write {_nested(parse_path(key))}"
    candidates = {dotted(other): (str(other[-1]), other[:-1] == generic[:-1]) for other, _ in setting_names(model)}
    inside = dotted((*generic[:-1], "")) if any(same_section for _, same_section in candidates.values()) else ""
    scored = [
        (score + SAME_SECTION_BONUS * same_section, name)
        for name, (leaf, same_section) in candidates.items()
        if (score := _score(key, leaf, name)) >= (MIN_SIMILARITY if name.startswith(inside) else 1)
    ]
    old_names = [
        (max(_similarity(dotted(path), old), _similarity(key, old), float(old.endswith(f".{key}"))), new)
        for old, new in aliases.items()
        if new.startswith(inside)
    ]
    scored += [(score, new) for score, new in old_names if score >= MIN_ALIAS_SIMILARITY]
    if scored and key != "type":  # a kind is chosen by `type` only where the section has it
        _, name = max(scored, key=lambda pair: (pair[0], -len(pair[1])))  # rewards: of environments, not of a set
        if inside and name.startswith(inside):
            name = dotted((*section, name.removeprefix(inside)))  # of the same list entry
        return f"did you mean {name}?"
    valid = [leaf for leaf, same_section in candidates.values() if same_section]
    where = f"in {dotted(section)}" if section else "at the top level"
    return f"valid {where}: {', '.join(valid)}" if valid else f"{dotted(section)} is not a section"


def _nested(path: KeyPath) -> str:
    """("environments", 0, "name") -> 'environments: [{name: ...}]'."""
    text = "..."
    for step in reversed(path):
        text = f"[{text}]" if isinstance(step, int) else f"{{{step}: {text}}}"
    return text[1:-1]


def setting_names(model: type[BaseModel], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    """Yield every setting of every union member, with the model that defines it. Index 0 means any list entry."""
    for name, field in model.model_fields.items():
        yield (*prefix, name), model
        inside = (*prefix, name, 0) if get_origin(field.annotation) is list else (*prefix, name)
        for section in sections(field.annotation):
            yield from setting_names(section, inside)


def sections(annotation: object) -> list[type[BaseModel]]:
    """Return the settings models in an annotation, through unions, lists and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in sections(part)]


def _score(key: str, leaf: str, name: str) -> float:
    """Return the similarity of a key to a setting; more if it is a part of its name, or joins it to its section."""
    *_, section, _ = f".{name}".replace(".0", "").split(".")
    joins = key.endswith(f"_{leaf}") and section.startswith(key.removesuffix(f"_{leaf}"))  # lora_rank and eval_every
    return max(_similarity(key, leaf), float(joins), 0.85 * (f"_{key}_" in f"_{leaf}_"))  # steps: of training_steps


def _similarity(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def raise_on(*lines: str) -> None:
    """Raise ConfigError with these lines if there are any."""
    if lines:
        raise ConfigError(*lines)


def location_suffix(path: KeyPath, locations: Locations) -> str:
    """Return ' (line 7 of x.yaml)' for the key. For a missing key, the location of the nearest section around it."""
    for length in range(len(path), 0, -1):
        if path[:length] in locations:
            return f" ({locations[path[:length]]})"
    return ""
