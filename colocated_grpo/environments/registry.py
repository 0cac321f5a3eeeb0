"""Lookup of environments by name: built in, installed by another package, or user code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.user_code.loading import construct, load_object, one_line, unknown_name
from colocated_grpo.types import JsonObject

ENTRY_POINTS = "colocated_grpo.environments"
"""Entry point group in which packages register environments."""
USER_CODE_FORMS = ("module:object", "path/to/file.py:object")


def find_environment(
    kind: str,
    name: str,
    args: JsonObject,
    built_in: Mapping[str, Callable[..., Any]],
    *forms: str,
    given: Any = None,
) -> Any:
    """Return `given` or the environment called `name`. A class is called with args; an instance accepts none."""
    found = find_object(kind, name, built_in, *forms) if given is None else given
    key = f"environments {name!r}"
    if isinstance(found, type):
        return construct(found, args, key)
    if args:
        raise EnvironmentSetupError(f"{key}: args={args}: the object is an instance, not a class; remove args")
    return found


def find_object(kind: str, name: str, built_in: Mapping[str, Callable[..., Any]], *forms: str) -> Any:
    """Return the object called `name`. `kind` and `forms` (further forms of a name) are for the error line."""
    check_name(kind, name, built_in, *forms)
    key = f"environments {name!r}"
    if name in built_in:
        return built_in[name]
    if name in installed():
        return _load(installed()[name], key)
    return load_object(name, key)


def check_name(kind: str, name: str, built_in: Mapping[str, Callable[..., Any]], *forms: str) -> None:
    """Raise EnvironmentSetupError unless `name` is built in, installed, or of a form that names user code."""
    if ":" not in name and name not in built_in and name not in installed():
        raise unknown_name("environments", kind, name, [*built_in, *installed(), *forms, *USER_CODE_FORMS])


@cache
def installed() -> dict[str, EntryPoint]:
    """Return the environments that installed packages register, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _load(point: EntryPoint, key: str) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise EnvironmentSetupError(f"{key}: cannot import {point.value!r}: {one_line(error)}") from error


def check_methods(found: Any, what: str, methods: tuple[str, ...], name: str) -> None:
    """Raise EnvironmentSetupError if `found` lacks one of the methods. `what` is its kind, such as "a task"."""
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if missing:
        lacks = " and no ".join(f"{method}()" for method in missing)
        raise EnvironmentSetupError(f"environments {name!r}: not {what}, it has no {lacks}")
