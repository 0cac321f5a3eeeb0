"""Rows of a local file or of a Hugging Face dataset, as items."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from colocated_grpo.config.sources import DatasetSourceConfig
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.prompts import checked_prompt
from colocated_grpo.environments.user_code.loading import one_line

Rows = Sequence[dict[str, Any]]
MOST_HELD_OUT = 64
"""Where the config names no number."""
WHOLE = DatasetSourceConfig.model_fields["split"].default
SAVED_TO_DISK = ("state.json", "dataset_dict.json")
"""One of these is in a folder that a dataset or several splits were saved to with save_to_disk()."""
NULLS_SOUGHT_IN = 10_000
"""Rows at a time."""
NO_CELL = object()
"""Stands in a .csv row for a cell or a column that is not there."""


class DatasetRows:
    """The rows of one environment, cut into a training part and a held-out part."""

    def __init__(self, name: str, config: DatasetSourceConfig, check: Callable[[dict[str, Any]], None]) -> None:
        """check: raises EnvironmentSetupError for an item that the rewards cannot judge."""
        self.name = name
        self.config = config
        self._check = check
        rows = self._load(config.split)
        if config.eval_split is None:
            held_out = min(MOST_HELD_OUT, len(rows) // 10) if config.held_out is None else config.held_out
            keep = len(rows) - held_out
            if keep <= 0:
                raise self._error(f"held_out={held_out} leaves no training row, the data has {len(rows)}")
            self.train, self.held_out = _cut(rows, 0, keep), _cut(rows, keep, len(rows))
        else:
            self.train, self.held_out = rows, self._load(config.eval_split)

    @property
    def remark(self) -> str | None:
        """Where nobody has said how many rows to hold out, and a tenth of them is none."""
        if self.config.held_out is not None or len(self.held_out):
            return None
        rule = "set held_out or eval_split"
        return f"environments {self.name!r}: of {len(self.train)} rows none is held out for evaluation; {rule}"

    def item(self, rows: Rows, index: int) -> dict[str, Any]:
        """Columns renamed, the prompt column under "prompt", the system message in front."""
        item = self._checked_item(rows[index], f"{self.name} row {index}")
        if self.config.system_prompt is not None:
            item["prompt"] = with_system_prompt(item["prompt"], self.config.system_prompt)
        return item

    def _checked_item(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        column, names = self.config.prompt_column, self.config.columns
        if column not in row:
            raise EnvironmentSetupError(
                f"environments {where!r}: no column {column!r}; it has: {', '.join(map(str, row))}"
            )
        rest = {names.get(key, key): value for key, value in row.items() if key != column}
        item = {**rest, "prompt": _plain_messages(row[column])}
        checked_prompt(item, where)
        return item

    def _load(self, split: str) -> Rows:
        """Checked here and not when they are drawn: the run would end at some step, and once more after each resume."""
        if not self._is_file():
            rows = self._with_columns(self._load_hub(split), split)
            self._check_item(rows[0], f"{self.name} row 0")
            self._check_nulls(rows, split)
            return rows
        rows = self._with_columns(self._read_file(split), split)
        for index, row in enumerate(rows):
            self._check_item(row, f"{self._path(split)} row {index}")
        return rows

    def _check_item(self, row: dict[str, Any], where: str) -> None:
        item = self._checked_item(row, where)
        try:
            self._check(item)
        except EnvironmentSetupError as error:
            raise EnvironmentSetupError(f"environments {where!r}: {error}") from None

    def _check_nulls(self, rows: Any, split: str) -> None:
        """Hugging Face datasets are typed: what is no prompt in one is null. Found without reading the rows."""
        column = rows.select_columns([self.config.prompt_column]).with_format("arrow")
        for number, table in enumerate(column.iter(NULLS_SOUGHT_IN)):
            if (prompts := table[self.config.prompt_column]).null_count:
                index = number * NULLS_SOUGHT_IN + prompts.is_null().index(True).as_py()
                raise self._error(f"row {index} of {split!r} has no {self.config.prompt_column!r}, it is null")

    def _with_columns(self, rows: Rows, split: str) -> Rows:
        """The rows: at least one, and the first has every column that the config names."""
        if not len(rows):
            raise self._error(f"no rows in {split!r}")
        first = rows[0]
        if self.config.prompt_column not in first:
            raise self._missing_column("prompt_column", self.config.prompt_column, first)
        for column in self.config.columns:
            if column not in first:
                raise self._missing_column("columns", column, first)
        return rows

    def _is_file(self) -> bool:
        return Path(self.config.name).suffix.lower() in READERS

    def _read_file(self, split: str) -> Rows:
        """A file has no splits: `eval_split` is the path of another file."""
        if self.config.subset is not None:
            raise self._error(f"subset={self.config.subset!r} has no meaning for a local file")
        if self.config.split != WHOLE:
            raise self._error(f"split={self.config.split!r} has no meaning for a local file, name the other file")
        path = self._path(split)
        if not path.is_file():
            raise self._error(f"no such file: {path}")
        reader = READERS.get(path.suffix.lower())
        if reader is None:
            raise self._error(f"eval_split={split!r} must be a file too: {', '.join(READERS)}")
        try:
            return reader(path)
        except (ValueError, OSError, csv.Error, ImportError) as error:
            raise self._error(f"cannot read {path}: {one_line(error)}") from error

    def _path(self, split: str) -> Path:
        return Path(self.config.name if split == self.config.split else split).expanduser()

    def _load_hub(self, split: str) -> Rows:
        try:
            from datasets import DatasetDict, load_dataset, load_from_disk
        except ModuleNotFoundError as error:
            raise self._error(f"cannot import {error.name!r}; install it with: pip install datasets") from None
        try:
            if not any((Path(self.config.name) / mark).is_file() for mark in SAVED_TO_DISK):
                return load_dataset(self.config.name, self.config.subset, split=split)
            saved = load_from_disk(self.config.name)
            if split != WHOLE and not isinstance(saved, DatasetDict):
                raise ValueError("one dataset without splits was saved here")
            return saved[split] if isinstance(saved, DatasetDict) else saved
        except Exception as error:  # the library raises whatever the network, the hub or a loading script raises
            raise self._error(f"cannot load split {split!r}: {one_line(error)}") from error

    def _missing_column(self, key: str, column: str, row: dict[str, Any]) -> EnvironmentSetupError:
        return self._error(f"{key}: no column {column!r}; the data has: {', '.join(map(str, row))}")

    def _error(self, message: str) -> EnvironmentSetupError:
        return EnvironmentSetupError(f"environments {self.name!r}: {message}")


def with_system_prompt(prompt: str | list[dict[str, Any]], system_prompt: str) -> list[dict[str, Any]]:
    """Chat messages with the system message in front; a prompt that brings its own keeps it."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def _plain_messages(prompt: Any) -> Any:
    """Columnar formats fill every message up to the same keys with None, which chat templates would print."""
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        return prompt
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def _cut(rows: Rows, start: int, stop: int) -> Rows:
    """Lists are sliced; a Hugging Face dataset stays memory-mapped."""
    return rows[start:stop] if isinstance(rows, list) else rows.select(range(start, stop))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    rows.append(_as_row(json.loads(line)))
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None
    return rows


def read_json(path: Path) -> list[dict[str, Any]]:
    """A list of rows, or a row a line, as the datasets library writes a .json file."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        return read_jsonl(path)
    if not isinstance(rows, list):
        raise ValueError(f"a .json file must hold a list of objects, this one holds a {type(rows).__name__}")
    return [_as_row(row) for row in rows]


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Values stay text: an answer '007' must not become 7."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, restkey=NO_CELL, restval=NO_CELL, strict=True)
        rows = []
        for row in reader:
            if NO_CELL in row or NO_CELL in row.values():
                amount = "more" if NO_CELL in row else "fewer"
                raise ValueError(f"line {reader.line_num}: {amount} cells than the header's {len(reader.fieldnames)}")
            rows.append(row)
        return rows


def read_parquet(path: Path) -> list[dict[str, Any]]:
    from pyarrow.parquet import read_table

    return read_table(path).to_pylist()


def _as_row(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a row must be an object, got {repr(value)[:60]}")
    return value


READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
