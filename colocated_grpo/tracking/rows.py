"""Rows of .jsonl files in a run folder: one JSON object per line.

The files are flushed every step. A killed run loses at most the line being written, so readers skip an incomplete last
line and reject any other damage.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from colocated_grpo.errors import RunError
from colocated_grpo.types import JsonObject

Row = JsonObject
NUMBER = int | float | None
SET_ASIDE = ".damaged"
"""Suffix of a damaged file that a resumed run has replaced."""


@dataclass(frozen=True)
class RowSchema:
    """Keys that every row has. Other keys are allowed."""

    required: Mapping[str, type | UnionType]
    numbers: Callable[[Row], Mapping[str, Any]] = lambda row: {}
    """Return the entries of a row that must be numbers."""


STEP_ROW = RowSchema({"step": int})


class RunFolderError(RunError):
    """A run folder cannot be read. The message is one line for the user."""


def read_rows(path: Path, schema: RowSchema = STEP_ROW) -> Iterator[Row]:
    """Yield the objects of a .jsonl file, none if it does not exist.

    A last line without a newline was cut by a kill and is skipped. Raises RunFolderError, with the line number, for a
    line that is not an object of the schema: another program may have written the file.
    """
    for row in _parsed_rows(path, schema):
        if isinstance(row, RunFolderError):
            raise row
        yield row


def keep_before(path: Path, first_step: int, schema: RowSchema, note: Callable[[str], None]) -> None:
    """Rewrite a .jsonl file without the rows of steps >= `first_step`, streaming: it may be larger than memory.

    Damaged lines are left out, with a note: a log must not keep a run from being resumed.
    """

    def kept() -> Iterator[str]:
        damaged: list[RunFolderError] = []
        for row in _parsed_rows(path, schema):
            if isinstance(row, RunFolderError):
                damaged.append(row)
            elif row["step"] < first_step:
                yield json_line(row)
        if damaged:  # the file is replaced after the end of this generator
            aside = path.with_name(path.name + SET_ASIDE)
            aside.unlink(missing_ok=True)
            shutil.copyfile(path, aside)
            note(f"{damaged[0]}; left out {len(damaged)} such lines, the file as it was is {aside.name}")

    write_atomically(path, kept())


def object_of(where: Path | str, value: Any) -> JsonObject:
    if not isinstance(value, dict):
        raise RunFolderError(f"{where}: must be an object, not {repr(value)[:60]}")
    return value


def json_line(row: Row) -> str:
    """Encode a row as one line of strict JSON. Raises ValueError for NaN and infinity."""
    return json.dumps(row, allow_nan=False) + "\n"


def write_atomically(path: Path, parts: str | Iterable[str]) -> None:
    """Replace a file atomically: readers see the old or the new content, even if the process is killed.

    `parts` may be a generator that reads the old file.
    """
    temporary = path.with_name(f".{path.name}.part")
    temporary.unlink(missing_ok=True)  # of a killed run, or a link to somewhere else
    with temporary.open("x", encoding="utf-8") as file:
        file.writelines([parts] if isinstance(parts, str) else parts)
    os.replace(temporary, path)


def _parsed_rows(path: Path, schema: RowSchema) -> Iterator[Row | RunFolderError]:
    """Yield each line as a row, or as the error that it is not one."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line_number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield _parsed(f"{path}:{line_number}", line, schema)
            except RunFolderError as error:
                yield error


def _parsed(where: str, line: str, schema: RowSchema) -> Row:
    try:
        value = json.loads(line, parse_constant=_reject)
    except json.JSONDecodeError as error:
        raise RunFolderError(f"{where}: not a JSON line ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{where}: not a JSON line ({error})") from error
    row = object_of(where, value)
    for key, kind in schema.required.items():
        if key not in row:
            raise RunFolderError(f"{where}: {key!r} is missing")
        if not isinstance(row[key], kind):
            raise RunFolderError(f"{where}: {key!r} is {repr(row[key])[:60]}, not {getattr(kind, '__name__', kind)}")
    for key, value in schema.numbers(row).items():
        if not isinstance(value, NUMBER):
            raise RunFolderError(f"{where}: {key!r} is {repr(value)[:60]}, not a number")
    return row


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
