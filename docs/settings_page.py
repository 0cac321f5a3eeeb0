"""Write docs/settings.md from the schema: python -m docs.settings_page"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from colocated_grpo.settings.errors import sections, show
from colocated_grpo.settings.schema import Config

PAGE = Path(__file__).resolve().parent / "settings.md"
HEADING = """\
# Settings

<!-- Written by python -m docs.settings_page from the docstrings in colocated_grpo/settings/. -->

A config is a YAML file with the keys below. On the command line a setting has its dotted name: `--policy.lr 2e-6`,
`--environments.0.weight 2`. Names of TRL and of older trainers are [translated](guides/from_trl.md). `--dry-run` checks
a config ([how to write one](running.md#write-a-config)).
"""
SYMBOLS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}
NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text", NoneType: "null", Any: "any"}


def page() -> str:
    """Return the text of docs/settings.md."""
    titles: dict[type[BaseModel], str] = {}
    for title, model in _sections(Config, ""):
        titles.setdefault(model, title)  # sources of prompts are also used in evaluation sets
    return "\n".join([HEADING, *(_block(title, model) for model, title in titles.items())])


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the title and the settings of this section, then of those inside it."""
    yield path or "Top level", model
    for name, field in model.model_fields.items():
        inside = sections(field.annotation)
        entry = f"{path}.{name}" if path else name
        entry += "[]" if get_origin(field.annotation) is list else ""
        for part in inside:
            tag = part.model_fields["type"] if len(inside) > 1 and "type" in part.model_fields else None
            kind = "" if tag is None else f" (type: {get_args(tag.annotation)[0]})"
            yield from ((title + kind * (title == entry), found) for title, found in _sections(part, entry))


def _block(title: str, model: type[BaseModel]) -> str:
    heading = f"## {title}\n"
    about = " ".join((model.__doc__ or "").split())
    rows = [_row(name, field) for name, field in model.model_fields.items()]
    lines = [heading, *([f"{about}\n"] if about and not _is_inherited(model) else [])]
    return "\n".join([*lines, "| Key | Value | Default | Meaning |", "|---|---|---|---|", *rows, ""])


def _is_inherited(model: type[BaseModel]) -> bool:
    return "__doc__" not in vars(model) or vars(model)["__doc__"] is None


def _row(name: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split()).replace("<", "&lt;")
    cells = (f"`{name}`", _value(field), _default(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(field: FieldInfo) -> str:
    return " ".join(filter(None, [_type(field.annotation), _bounds(field.metadata)]))


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, BaseModel):
        tag = getattr(field.default, "type", None)
        return "" if tag is None else f"`{{type: {tag}}}`"
    if isinstance(field.default, list | dict) and field.default:
        return f"`{field.default}`"
    return f"`{show(field.default)}`" if not isinstance(field.default, str) else f"`{field.default}`"


def _type(annotation: Any) -> str:
    """Return a type as a reader of YAML would call it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return " ".join(filter(None, [_type(parts[0]), _bounds(parts[1:])]))
    if origin is Literal:
        return ", ".join(f"`{show(part) if not isinstance(part, str) else part}`" for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_type, parts)))
    if origin is list:
        return f"list of {_type(parts[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return NAMES.get(annotation, str(annotation))


def _bounds(metadata: Any) -> str:
    found = []
    for one in metadata:
        for kind, (symbol, attribute) in SYMBOLS.items():
            if isinstance(one, kind):
                found.append(f"{symbol} {getattr(one, attribute):g}")
        if isinstance(one, MinLen):
            found.append("not empty")
        if isinstance(one, FieldInfo):
            found.append(_bounds(one.metadata))
    return ", ".join(filter(None, found))


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
