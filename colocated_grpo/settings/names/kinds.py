"""Kinds of aliases for another trainer's settings: renamed, one of a few values, not needed, not supported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from colocated_grpo.settings.errors import show
from colocated_grpo.types import JsonObject

Lookup = Callable[[str], Any]
"""Returns the value at a dotted path of the settings translated so far, or None."""
NewSettings = JsonObject
"""Values by new dotted name."""
Translate = Callable[[str, Any, Lookup], NewSettings]
"""Maps (last part of the old name, value, lookup) to new settings. Raises ValueError with the violated rule."""


@dataclass(frozen=True)
class Alias:
    translate: Translate
    new_name: str = ""
    """Setting that is suggested for a misspelled old name. If this is not a setting's name, the old name is
    suggested."""
    remark: str = ""
    """Appended to the note that reports the translation."""

    @property
    def names_a_setting(self) -> bool:
        return bool(self.new_name) and " " not in self.new_name


def unless_null(translate: Translate) -> Translate:
    """Wrap `translate` so that null sets nothing: other trainers use null for the default."""

    @wraps(translate)
    def translate_value(key: str, value: object, get: Lookup) -> NewSettings:
        return {} if value is None else translate(key, value, get)

    return translate_value


def renamed(new_name: str, remark: str = "") -> Alias:
    """Return an alias that passes its value unchanged to the setting `new_name`."""
    return Alias(unless_null(lambda _key, value, _get: {new_name: value}), new_name, remark)


def one_of(new_name: str, values: Mapping[Any, object], remark: str = "") -> Alias:
    """Return an alias that accepts the keys of `values` and sets `new_name` to the mapped value; None sets nothing.

    If all mapped values are None, `new_name` explains why only these keys are accepted.
    """

    @unless_null
    def translate(_key: str, value: object, _get: Lookup) -> NewSettings:
        key = value.lower() if isinstance(value, str) else value
        if isinstance(key, dict | list) or key not in values:
            accepted = ", ".join(show(known) for known in values)
            raise ValueError(f"must be {'one of ' if len(values) > 1 else ''}{accepted} ({new_name})")
        return {} if values[key] is None else {new_name: values[key]}

    return Alias(translate, new_name, remark)


def not_needed(why: str) -> Alias:
    """Return an alias that is accepted with any value and sets nothing."""
    return Alias(lambda _key, _value, _get: {}, remark=why)


def each(names: str, alias: Alias) -> dict[str, Alias]:
    """Return a dictionary with the same alias under each name. names: separated by spaces."""
    return dict.fromkeys(names.split(), alias)


def not_supported(instead: str) -> Alias:
    """Return an alias that is rejected with any value but null. `instead` says what to do."""

    @unless_null
    def translate(_key: str, _value: object, _get: Lookup) -> NewSettings:
        raise ValueError(f"not supported; {instead}")

    return Alias(translate)


def group_size_of(completions: int) -> int:
    """Return a group size for a batch of at least 2 completions: the first of 8, 4, 2 that divides it, else its
    smallest divisor."""
    return next(size for size in (8, 4, *range(2, completions + 1)) if completions % size == 0)
