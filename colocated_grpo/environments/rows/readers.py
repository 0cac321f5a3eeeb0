"""Rows of local files, and their selection by a function."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from colocated_grpo.environments.base import EnvironmentSetupError, Item
from colocated_grpo.environments.user_code.loading import errors_named, load_function
from colocated_grpo.errors import ConfigError, shortened
from colocated_grpo.settings.sources import RowsSourceConfig

if TYPE_CHECKING:
    from datasets import Dataset


def _unique(pairs: list[tuple[str, object]]) -> Item:
    """Return a JSON object. Raises ValueError for a repeated key, of which json would keep the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_unique)


def read_jsonl(path: Path) -> list[Item]:
    """Read one row per line. Empty lines are skipped."""
    rows = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    rows.append(_as_row(_JSON.decode(line)))
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number}, column {error.pos + 1}: {error.msg}") from None
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number}: {error}") from None
    return rows


def read_json(path: Path) -> list[Item]:
    """Read a JSON list of rows, or JSON Lines, which the datasets library also writes to .json files."""
    try:
        rows = _JSON.decode(path.read_text(encoding="utf-8-sig"))
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
        rows = []
        try:
            header = next(reader, [])
            for cells in filter(None, reader):
                if len(cells) != len(header):
                    amount = "more" if len(cells) > len(header) else "fewer"
                    raise ValueError(f"{amount} cells than the header's {len(header)}")
                rows.append(_unique(list(zip(header, cells, strict=True))))
        except UnicodeDecodeError:
            raise  # text is decoded in blocks, so the line is not known
        except (ValueError, csv.Error) as error:
            raise ValueError(f"line {reader.line_num}: {error}") from None
        return rows


def read_parquet(path: Path) -> list[Item]:
    from pyarrow.parquet import read_table

    return read_table(path).to_pylist()


def _as_row(value: object) -> Item:
    if not isinstance(value, dict):
        raise ValueError(f"a row must be an object, got {repr(value)[:60]}")
    return value


READERS = {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".parquet": read_parquet}


def read_file(path: Path) -> list[Item]:
    """Return the rows of a file of any type in READERS. Raises ConfigError with one line."""
    reader = READERS.get(path.suffix.lower())
    try:
        if reader is None:
            raise ValueError(f"must be a file of one of these types: {', '.join(READERS)}")
        if not path.is_file():
            raise ValueError("no such file")
        return reader(path)
    except (OSError, ValueError) as error:
        advice = "; save the file as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise ConfigError(f"{str(path)!r}: {error}{advice}") from error


SHOWN = 3
"""Row numbers listed before '...'."""

AnyRows: TypeAlias = "list[Item] | Dataset"


def filter_rows(rows: AnyRows, config: RowsSourceConfig, key: str) -> tuple[Sequence[int], str | None]:
    """Return the numbers of the rows to keep, and a line about others, if any. Raises EnvironmentSetupError."""
    if config.filter is None:
        return range(len(rows)), None
    keep = load_function(config.filter, f"{key}: filter")
    name = f"filter {config.filter}"
    kept: list[int] = []
    dropped: list[int] = []
    for number in range(len(rows)):
        with errors_named(f"{key}: {name}: row {number}"):
            answer = keep(dict(rows[number]))
            (kept if answer else dropped).append(number)
        if answer is None or isinstance(answer, str):  # text: "no" would keep the row
            rule = f"returned {shortened(repr(answer), 60)}, not true or false"
            raise EnvironmentSetupError(f"{key}: {name}: row {number}: {rule}")
    if not dropped:
        return kept, None
    shown = ", ".join(map(str, dropped[:SHOWN])) + ", ..." * (len(dropped) > SHOWN)
    return kept, f"{len(kept)} of {len(rows)} rows are kept; left out: {len(dropped)} by {name} (rows {shown})"


def select(rows: AnyRows, numbers: Sequence[int]) -> AnyRows:
    """Return the rows with the given numbers, in the order of `numbers`."""
    if isinstance(rows, list) or not len(numbers):  # Dataset.select() raises for an empty range at the end
        return [rows[number] for number in numbers]
    return cast("Dataset", rows.select(numbers))  # annotated as Dataset | DatasetDict
