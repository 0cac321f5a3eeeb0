"""Reading and writing settings by path in plain dicts and lists."""

from __future__ import annotations

from typing import Any

from colocated_grpo.config.errors import ConfigError, KeyPath, dotted


def lookup(tree: Any, path: KeyPath) -> Any:
    """The value at `path`, or None."""
    for step in path:
        if isinstance(tree, dict):
            tree = tree.get(step)
        elif isinstance(tree, list) and isinstance(step, int) and step < len(tree):
            tree = tree[step]
        else:
            return None
    return tree


def place(tree: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set the value at `path`; missing sections are made, and a list grows by its next index."""
    node: Any = tree
    for number, step in enumerate(path):
        is_last = number == len(path) - 1
        if isinstance(node, list):
            _check_index(node, step, path[:number], path)
            if step == len(node):
                node.append(None)
        elif not isinstance(node, dict):
            raise ConfigError(f"{dotted(path)}: {dotted(path[:number])} is a value, not a section")
        if is_last:
            node[step] = value
            return
        child = node[step] if isinstance(node, list) else node.get(step)
        if child is None:
            child = node[step] = [] if isinstance(path[number + 1], int) else {}
        node = child


def _check_index(entries: list[Any], step: str | int, parent: KeyPath, path: KeyPath) -> None:
    if not isinstance(step, int):
        raise ConfigError(f"{dotted(path)}: {dotted(parent)} is a list; name an entry as in {dotted(parent)}.0")
    if step > len(entries):
        raise ConfigError(f"{dotted(path)}: {dotted(parent)} has {len(entries)} entries, numbered from 0")


def remove(tree: dict[str, Any], path: KeyPath) -> None:
    *section, last = path
    lookup(tree, tuple(section)).pop(last)
