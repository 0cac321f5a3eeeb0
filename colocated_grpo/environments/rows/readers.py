"""Rows of local files."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

from colocated_grpo.environments.base import Item

MAX_DEPTH = 100
"""Maximum levels of lists and objects in a row of a JSON file. Copying and sending deeper values would exceed Python's
recursion limit in the middle of a run."""
TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} deep"


def read_jsonl(path: Path) -> list[Item]:
    """Read one row per line. Empty lines are skipped."""
    rows = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    rows.append(_parsed_row(line))
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None
    return rows


def read_json(path: Path) -> list[Item]:
    """Read a JSON list of rows, or JSON Lines, which the datasets library also writes to .json files."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        return read_jsonl(path)
    if not isinstance(rows, list):
        raise ValueError(f"a .json file must hold a list of objects, this one holds a {type(rows).__name__}")
    return [_checked_depth(_as_row(row)) for row in rows]


def read_csv(path: Path) -> list[Item]:
    """Read rows. The header names the columns. Values stay text: an answer '007' must not become 7."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        header = next(reader, [])
        rows = []
        for cells in filter(None, reader):
            if len(cells) != len(header):
                amount = "more" if len(cells) > len(header) else "fewer"
                raise ValueError(f"line {reader.line_num}: {amount} cells than the header's {len(header)}")
            rows.append(dict(zip(header, cells, strict=True)))
        return rows


def read_parquet(path: Path) -> list[Item]:
    from pyarrow.parquet import read_table

    return read_table(path).to_pylist()


def _parsed_row(line: str) -> Item:
    try:
        row = _as_row(json.loads(line))
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    # Most lines have few brackets. Counting brackets costs less than walking through the values.
    return row if line.count("[") + line.count("{") <= MAX_DEPTH else _checked_depth(row)


def _checked_depth(row: Item) -> Item:
    level: list[Item | list[object]] = [row]
    for _ in range(MAX_DEPTH):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return row
    raise ValueError(TOO_DEEP)


def _as_row(value: object) -> Item:
    if not isinstance(value, dict):
        raise ValueError(f"a row must be an object, got {repr(value)[:60]}")
    return value


READERS: dict[str, Callable[[Path], list[Item]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
