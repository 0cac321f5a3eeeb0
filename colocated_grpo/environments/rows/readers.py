"""Rows of local files."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

from colocated_grpo.environments.base import Item


def read_jsonl(path: Path) -> list[Item]:
    """Read one row per line. Empty lines are skipped."""
    rows = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    rows.append(_as_row(json.loads(line)))
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number}: {error}") from None
    return rows


def read_json(path: Path) -> list[Item]:
    """Read a JSON list of rows, or JSON Lines, which the datasets library also writes to .json files."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        return read_jsonl(path)
    if not isinstance(rows, list):
        raise ValueError(f"a .json file must hold a list of objects, this one holds a {type(rows).__name__}")
    return [_as_row(row) for row in rows]


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
