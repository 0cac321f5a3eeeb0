"""Reads, writes and removes settings by path in nested dicts and lists."""

from __future__ import annotations

from typing import Any

from colocated_grpo.settings.errors import ConfigError, KeyPath, SettingsTree, dotted


def lookup(tree: Any, path: KeyPath) -> Any:
    """Return the value at `path`, or None."""
    for step in path:
        if isinstance(tree, dict):
            tree = tree.get(step)
        elif isinstance(tree, list) and isinstance(step, int) and step < len(tree):
            tree = tree[step]
        else:
            return None
    return tree


def assign(tree: SettingsTree, path: KeyPath, value: Any) -> None:
    """Set the value at `path` in place. Creates missing sections, and appends to a list at its next index.

    Raises ConfigError where the path leads through a plain value, or skips list entries.
    """
    node: Any = tree
    for depth, step in enumerate(path[:-1]):
        child = _child(node, step, path[:depth], path)
        if child is None:
            child = [] if isinstance(path[depth + 1], int) else {}
            _set(node, step, child)
        node = child
    _child(node, path[-1], path[:-1], path)
    _set(node, path[-1], value)


def _child(node: Any, step: str | int, parent: KeyPath, path: KeyPath) -> Any:
    """Return entry `step` of `node`, None where it is missing. Raises ConfigError where it cannot be set."""
    if isinstance(node, dict):
        return node.get(step)
    if not isinstance(node, list):
        raise ConfigError(f"{dotted(path)}: {dotted(parent)} is a value, not a section")
    if not isinstance(step, int):
        raise ConfigError(f"{dotted(path)}: {dotted(parent)} is a list; name an entry, as in {dotted(parent)}.0")
    if step > len(node):
        raise ConfigError(f"{dotted(path)}: {dotted(parent)} has {len(node)} entries, numbered from 0")
    return node[step] if step < len(node) else None


def _set(node: Any, step: str | int, value: Any) -> None:
    if isinstance(node, list) and step == len(node):
        node.append(value)
    else:
        node[step] = value


def remove(tree: SettingsTree, path: KeyPath) -> None:
    """Remove the entry at `path`, which must exist."""
    lookup(tree, path[:-1]).pop(path[-1])
