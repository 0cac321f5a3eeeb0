"""What an old name can mean for our settings: another name, one of a few values, nothing, or no equivalent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from colocated_grpo.config.errors import show

Lookup = Callable[[str], Any]
"""Value at a dotted path of the settings as far as they are translated, or None."""
Translate = Callable[[str, Any, Lookup], dict[str, Any]]
"""(last part of the old name, value, lookup) -> values by new dotted name. Raises ValueError with the rule."""


@dataclass(frozen=True)
class Alias:
    translate: Translate
    new_name: str = ""
    """For suggestions; where it is no setting, the old name is suggested, whose own line then says what to do."""
    remark: str = ""
    """Added to the note."""

    @property
    def names_a_setting(self) -> bool:
        return bool(self.new_name) and " " not in self.new_name


def unless_null(translate: Translate) -> Translate:
    """null is how other trainers write that a setting has its default: then there is nothing to set."""

    @wraps(translate)
    def translate_value(key: str, value: Any, look: Lookup) -> dict[str, Any]:
        return {} if value is None else translate(key, value, look)

    return translate_value


def renamed(new_name: str, remark: str = "") -> Alias:
    return Alias(unless_null(lambda _key, value, _look: {new_name: value}), new_name, remark)


def one_of(new_name: str, values: Mapping[Any, Any], remark: str = "") -> Alias:
    """Only the listed values have an equivalent. None in `values` means: it is so anyway, nothing to set."""

    @unless_null
    def translate(_key: str, value: Any, _look: Lookup) -> dict[str, Any]:
        key = value.lower() if isinstance(value, str) else value
        if isinstance(key, dict | list) or key not in values:
            raise ValueError(f"no equivalent here; known are {', '.join(show(known) for known in values)} ({new_name})")
        return {} if values[key] is None else {new_name: values[key]}

    return Alias(translate, new_name, remark)


def not_needed(why: str) -> Alias:
    return Alias(lambda _key, _value, _look: {}, remark=why)


def no_equivalent(instead: str) -> Alias:
    @unless_null
    def translate(_key: str, _value: Any, _look: Lookup) -> dict[str, Any]:
        raise ValueError(f"no equivalent here; {instead}")

    return Alias(translate)
