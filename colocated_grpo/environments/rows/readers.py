"""Rows of local files, and their selection by conditions on columns and by a function."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from colocated_grpo.environments.base import EnvironmentSetupError, Item
from colocated_grpo.environments.user_code.loading import load_function, one_line
from colocated_grpo.errors import ConfigError
from colocated_grpo.settings.sources import ConditionConfig, RowsSourceConfig, Scalar

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


ROWS_AT_A_TIME = 10_000
"""Rows of a Hugging Face dataset that are decoded together."""
SHOWN = 3
"""Row numbers listed before '...'."""

AnyRows: TypeAlias = "list[Item] | Dataset"


def filter_rows(rows: AnyRows, config: RowsSourceConfig, key: str) -> tuple[list[int], str | None]:
    """Return the numbers of the rows to keep, and a line about others, if any. Raises EnvironmentSetupError."""
    keep = None if config.filter is None else load_function(config.filter, f"{key}: filter")
    left, parts = list(range(len(rows))), []
    try:
        for name, meets in _conditions(rows, config, keep):
            kept = [number for number in left if meets(number)]
            if len(kept) < len(left):
                dropped = sorted(set(left) - set(kept))
                shown = ", ".join(map(str, dropped[:SHOWN])) + ", ..." * (len(dropped) > SHOWN)
                parts.append(f"{len(dropped)} by {name} (rows {shown})")
            left = kept
    except ValueError as error:  # datasets raises it for an unknown column
        raise EnvironmentSetupError(f"{key}: {error}") from error
    return left, f"{len(left)} of {len(rows)} rows are kept; left out: {', '.join(parts)}" if parts else None


def _conditions(
    rows: AnyRows, config: RowsSourceConfig, keep: Callable[[Item], object] | None
) -> Iterator[tuple[str, Callable[[int], bool]]]:
    """Yield the name of each condition, and a function that tests a row by its number."""
    for column, condition in config.where.items():
        values = column_values(rows, column)
        yield f"where.{column}", partial(_meets, values, condition, column)
    if keep is not None:
        name = f"filter {config.filter}"
        yield name, partial(_is_kept, rows, keep, name)


def _is_kept(rows: AnyRows, keep: Callable[[Item], object], name: str, number: int) -> bool:
    try:
        kept = keep(dict(rows[number]))
    except (Exception, SystemExit) as error:  # user code
        raise ValueError(f"{name}: row {number}: {one_line(error)}") from error
    if kept is None:
        raise ValueError(f"{name}: row {number}: returned None, not true or false")
    return bool(kept)


def _meets(values: Sequence[object], condition: ConditionConfig, column: str, row: int) -> bool:
    """Return whether a row's value meets a condition; null meets none. Raises ValueError for bounds on a non-number."""
    value = values[row]
    if value is None:
        return False
    if condition.any is not None:
        return any(is_equal(value, wanted) for wanted in condition.any)
    number = as_number(value)
    if number is None:
        raise ValueError(f"row {row}: column {column!r} is {repr(value)[:60]}, not a number, and where sets bounds")
    low, high = condition.min, condition.max
    return (low is None or number >= low) and (high is None or number <= high)


def is_equal(value: object, wanted: Scalar) -> bool:
    """Return whether a value of the data equals `wanted`. Text equals the number or boolean that it spells."""
    if isinstance(wanted, bool) or isinstance(value, bool):
        spelled = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
        return spelled is wanted
    return value == wanted if isinstance(wanted, str) else as_number(value) == wanted


def as_number(value: object) -> float | None:
    """Return a number; text is parsed. None for NaN and any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return None if number != number else number


def column_values(rows: AnyRows, column: str) -> list[object]:
    """Return the values of a column; None for rows without the column."""
    if isinstance(rows, list):
        return [row.get(column) for row in rows]
    selected: Any = rows.select_columns([column])  # annotated as Dataset | DatasetDict, and batches as rows
    return [value for batch in selected.iter(ROWS_AT_A_TIME) for value in batch[column]]


def select(rows: AnyRows, numbers: Sequence[int]) -> AnyRows:
    """Return the rows with the given numbers, in the order of `numbers`."""
    if isinstance(rows, list) or not len(numbers):  # Dataset.select() raises for an empty range at the end
        return [rows[number] for number in numbers]
    return cast("Dataset", rows.select(numbers))  # annotated as Dataset | DatasetDict
