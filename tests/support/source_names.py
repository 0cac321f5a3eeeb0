"""Finds module attributes in Python sources without importing them, so that packages built for CUDA can be checked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def defines(root: Path, target: str) -> bool:
    """True if 'package.module:name' or 'package.module:Class.attribute' is defined in the sources under `root`."""
    module, _, path = target.partition(":")
    base = root / module.replace(".", "/")
    file = next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)
    if file is None:
        return False
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    *classes, name = path.split(".")
    for owner in classes:
        found = [node for node in _flat(nodes) if isinstance(node, ast.ClassDef) and node.name == owner]
        if not found:
            return False
        nodes = found[0].body
    return name in set(_names(nodes)) or (bool(classes) and name in set(_own_attributes(nodes)))


def _flat(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, with those inside if and try."""
    for node in nodes:
        yield node
        if isinstance(node, ast.If | ast.Try):
            inner = [*node.body, *node.orelse]
            if isinstance(node, ast.Try):
                inner += [statement for handler in node.handlers for statement in handler.body]
            yield from _flat(inner)


def _names(nodes: list[ast.stmt]) -> Iterator[str]:
    for node in _flat(nodes):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _own_attributes(nodes: list[ast.stmt]) -> Iterator[str]:
    """Names assigned as self.name in the methods of a class."""
    for node in nodes:
        for child in ast.walk(node):
            if isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                yield from (t.attr for t in targets if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name))
