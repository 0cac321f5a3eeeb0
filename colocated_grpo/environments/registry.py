"""Environments by name: built in, installed by another package, or the user's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.user_code.loading import construct, load_object, one_line, unknown_name

ENTRY_POINTS = "colocated_grpo.environments"
OWN_CODE = ("module:object", "path/to/file.py:object")


def find_environment(
    kind: str, name: str, args: dict[str, Any], built_in: Mapping[str, Callable[..., Any]], *forms: str
) -> Any:
    """The environment behind `name`: a class is called with args, an instance takes none. The rest: `find_object`."""
    found, key = find_object(kind, name, built_in, *forms), f"environments {name!r}"
    if isinstance(found, type):
        return construct(found, args, key)
    if args:
        raise EnvironmentSetupError(f"{key}: args={args} given, but the object is an instance, not a class")
    return found


def find_object(kind: str, name: str, built_in: Mapping[str, Callable[..., Any]], *forms: str) -> Any:
    """What `name` stands for. kind and forms (further ways to write a name) are for the error message."""
    check_name(kind, name, built_in, *forms)
    key = f"environments {name!r}"
    if name in built_in:
        return built_in[name]
    if name in installed():
        return _load(installed()[name], key)
    return load_object(name, key)


def check_name(kind: str, name: str, built_in: Mapping[str, Callable[..., Any]], *forms: str) -> None:
    """Raise one line where `name` is neither built in nor installed, nor written as the user's own code is."""
    if ":" not in name and name not in built_in and name not in installed():
        raise unknown_name("environments", kind, name, [*built_in, *installed(), *forms, *OWN_CODE])


@cache
def installed() -> dict[str, EntryPoint]:
    """Environments that other packages announce."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _load(point: EntryPoint, key: str) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise EnvironmentSetupError(f"{key}: cannot import {point.value!r}: {one_line(error)}") from error


def check_methods(found: Any, what: str, methods: tuple[str, ...], name: str) -> None:
    """Raise one line that names what `found` lacks to be a task or an episode."""
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if missing:
        lacks = " and no ".join(f"{method}()" for method in missing)
        raise EnvironmentSetupError(f"environments {name!r}: not {what}, it has no {lacks}")
