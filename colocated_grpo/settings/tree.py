"""Settings as plain nested data: parsed from YAML text, with the line of every key, and changed by path.

Scalars follow YAML 1.2 where PyYAML's rules (YAML 1.1) give surprising results: `1e-5` is a number; `on`, `off`, `yes`
and `no` are text; `010` is ten; `12:30` and `2024-01-01` are text.
"""

import re
from typing import Any

import yaml

from colocated_grpo.settings.errors import ConfigError, KeyPath, SettingsTree, dotted

MAX_DIGITS = 100


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # without PyYAML's YAML 1.1 rules


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if len(text) > MAX_DIGITS:
        raise yaml.constructor.ConstructorError(None, None, f"a number of {len(text)} digits", node.start_mark)
    return int(text)


_FLOAT = (
    r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:[tT]rue|TRUE|[fF]alse|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+(?:_[0-9]+)*$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_document(text: str, name: str) -> tuple[SettingsTree, dict[KeyPath, int]]:
    """Return the mapping in `text` and the line (from 1) of every key path. Error lines begin with `name`."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        if node is not None:
            _collect_lines(node, (), lines, name, set())
        tree = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = error.problem or error.context or ""
        if repr("\t") in problem:
            problem = "a tab; YAML is indented with spaces only"
        if name.endswith(".jsonl"):
            problem += "; these are rows of data: colocated-grpo init writes a config for them"
        raise ConfigError(f"{name}:{line}: not valid YAML: {problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None
    if tree is None:
        raise ConfigError(f"{name}: empty; at least model.name is required")
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}: must be a mapping of settings, not a {type(tree).__name__}")
    return tree, lines


def parse_value(text: str) -> object:
    """Parse one value as in a YAML file. Invalid YAML is returned as text, so that a shell needs no extra quotes."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError):
        return text


def _collect_lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str, visited: set[int]) -> None:
    if id(node) in visited:
        return  # an anchor used again: visiting every use could take exponential time
    visited.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen and key != "<<":
                raise ConfigError(f"{name}:{line}: {dotted((*path, key))}: given twice")
            seen.add(key)
            lines[*path, key] = line
            _collect_lines(value_node, (*path, key), lines, name, visited)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*path, index] = item.start_mark.line + 1
            _collect_lines(item, (*path, index), lines, name, visited)


def copy_nested(value: Any) -> Any:
    """Copy nested dictionaries and lists. Unlike deepcopy, it is fast, and accepts values that cannot be copied."""
    if type(value) is dict:
        return {key: copy_nested(inner) for key, inner in value.items()}
    return [copy_nested(inner) for inner in value] if type(value) is list else value


def lookup(tree: object, path: KeyPath) -> Any:
    """Return the value at `path`; None if there is no such entry."""
    for step in path:
        if isinstance(tree, dict):
            tree = tree.get(step)
        elif isinstance(tree, list) and isinstance(step, int) and step < len(tree):
            tree = tree[step]
        else:
            return None
    return tree


def assign(tree: SettingsTree, path: KeyPath, value: object) -> None:
    """Set the value at `path` in place. Creates missing sections, and a list's next entry; else raises ConfigError."""
    node: Any = tree
    for depth, step in enumerate(path):
        section, name = node, dotted(path[:depth])
        if isinstance(section, list):
            if not isinstance(step, int):
                raise ConfigError(f"{dotted(path)}: {name} is a list; name an entry, as in {name}.0")
            if step > len(section):
                raise ConfigError(f"{dotted(path)}: the next new entry of {name} is {name}.{len(section)}")
            if step == len(section):
                section.append(None)
        elif not isinstance(section, dict):
            raise ConfigError(f"{dotted(path)}: {name} is a value, not a section")
        if depth + 1 == len(path):
            node[step] = value
        elif lookup(node, (step,)) is None:
            node[step] = [] if isinstance(path[depth + 1], int) else {}
        node = node[step]
