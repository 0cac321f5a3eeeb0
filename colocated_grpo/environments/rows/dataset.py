"""Items from the rows of a local file or a Hugging Face dataset."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from colocated_grpo.environments.base import EnvironmentSetupError, Item, Items, ItemStream
from colocated_grpo.environments.prompts import PLAIN, TOOLS, VARIABLES, checked_prompt, strip_nulls, with_system_prompt
from colocated_grpo.environments.rows.readers import READERS, AnyRows, filter_rows, read_file, select
from colocated_grpo.environments.streams import SequenceStream, json_bytes
from colocated_grpo.environments.user_code.loading import errors_named
from colocated_grpo.errors import ConfigError
from colocated_grpo.settings.sources import RowsSourceConfig
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset

MAX_HELD_OUT = 64
"""Upper bound of the rows held out by default."""
DEFAULT_SPLIT = RowsSourceConfig.model_fields["split"].default
SAVED_TO_DISK = ("state.json", "dataset_dict.json")
"""Marker files that save_to_disk() writes for a Dataset and for a DatasetDict."""
ROWS_AT_A_TIME = 10_000
"""Rows of a Hugging Face dataset that are read together."""


class RowItems(Items):
    """Items from the rows of a local file or a Hugging Face dataset. The rows are loaded on first use, on rank 0."""

    default_count = sys.maxsize >> 1  # all rows

    def __init__(self, name: str, config: RowsSourceConfig, check: Callable[[Item], None]) -> None:
        """check: raises EnvironmentSetupError for an item that cannot be scored."""
        self._name = name
        self._config = config
        self._check = check
        self._filter_notes: list[str] = []

    @cached_property
    def _parts(self) -> tuple[AnyRows, AnyRows]:
        """The training and the held-out rows."""
        rows = self._load(self._config.split)
        if self._config.eval_split is not None:
            return rows, self._load(self._config.eval_split)
        held_out = num_held_out(self._config.held_out, len(rows))
        count = len(rows) - held_out
        if count <= 0:
            raise self._error(f"held_out={held_out}: no training row is left of {len(rows)}; set a smaller number")
        return select(rows, range(count)), select(rows, range(count, len(rows)))

    @property
    def filter_notes(self) -> Sequence[str]:
        _ = self._parts
        return self._filter_notes

    @property
    def held_out_note(self) -> str | None:
        train, held_out = self._parts
        if self._config.held_out is not None or len(held_out):
            return None
        return (
            f"environments {self._name!r}: none of {len(train)} rows is held out for evaluation; "
            "set held_out or eval_split"
        )

    def open_stream(self, seed: int) -> ItemStream:
        train, _ = self._parts
        return RowStream(self._name, train, partial(self._item, train), seed if self._config.shuffle else None)

    def held_out(self, seed: int) -> Iterator[Item]:
        _, held_out = self._parts
        return (self._item(held_out, index) for index in range(len(held_out)))

    def evaluated(self, seed: int) -> Iterator[Item]:
        """Yield all rows of `split` in the order of the data. Held-out rows are the last rows."""
        return (self._item(rows, index) for rows in self._parts for index in range(len(rows)))

    def _item(self, rows: AnyRows, index: int) -> Item:
        return self._checked_item(rows[index], f"{self._name} row {index}")

    def _checked_item(self, row: Item, where: str) -> Item:
        """Return a row as an item: columns renamed, the prompt under "prompt", the system prompt added."""
        column, names = self._config.prompt_column, self._config.columns
        if column not in row:
            problem = f"no column {column!r}; it has: {', '.join(map(str, row))}"
            raise EnvironmentSetupError(f"environments {where!r}: {problem}")
        rest = {names.get(key, key): value for key, value in row.items() if key != column}
        item = {**rest, "prompt": strip_nulls(row[column])}
        prompt = checked_prompt(item, where)
        PLAIN.arguments(item, where)
        if self._config.system_prompt is not None:
            item["prompt"] = with_system_prompt(prompt, self._config.system_prompt)
        return item

    def _load(self, split: str) -> AnyRows:
        """Load and check the rows of a split. A bad row found later would stop the run, and again after each resume."""
        rows, where = self._read(split)
        self._check_columns(rows, split)
        rows, numbers = self._filtered(rows, split)
        if not isinstance(rows, list):
            self._check_item(rows[0], f"{where} row {numbers[0]}")
            self._check_nulls(rows, numbers, split)
            self._check_json(rows, numbers, where)
            return rows
        for number, row in zip(numbers, rows, strict=True):
            self._check_item(row, f"{where} row {number}")
        return rows

    def _filtered(self, rows: AnyRows, split: str) -> tuple[AnyRows, Sequence[int]]:
        """Return the rows that `filter` keeps, and their row numbers in the unfiltered data."""
        numbers, note = filter_rows(rows, self._config, f"environments {self._name!r}: {split!r}")
        if note is None:
            return rows, numbers
        if not numbers:
            raise self._error(f"{split!r}: {note}; the first row is {repr(dict(rows[0]))[:200]}")
        self._filter_notes.append(f"environments {self._name!r}: {split!r}: {note}")
        return select(rows, numbers), numbers

    def _read(self, split: str) -> tuple[AnyRows, str]:
        """Return the rows of a split, and the name of their source. For a file, `eval_split` is another file."""
        trained = split == self._config.split
        given = self._config.given if trained else self._config.given_held_out
        if given is not None:
            return given, self._name if trained else split
        if Path(self._config.name).suffix.lower() in READERS:
            path = Path(self._config.name if trained else split).expanduser()
            return self._read_file(path, split), str(path)
        return self._load_hub(split), self._name

    def _check_item(self, row: Item, where: str) -> None:
        item = self._checked_item(row, where)
        try:
            self._check(item)
        except EnvironmentSetupError as error:
            raise EnvironmentSetupError(f"environments {where!r}: {error}") from None

    def _check_nulls(self, rows: "Dataset", numbers: Sequence[int], split: str) -> None:
        """Raise if a prompt is null. Columns are typed: if the prompt of row 0 is valid, only a null can be bad."""
        # The Arrow format is scanned without decoding rows. `datasets` has no annotation for this format.
        column: Any = rows.select_columns([self._config.prompt_column]).with_format("arrow")
        for number, table in enumerate(column.iter(ROWS_AT_A_TIME)):
            if (prompts := table[self._config.prompt_column]).null_count:
                index = numbers[number * ROWS_AT_A_TIME + prompts.is_null().index(True).as_py()]
                raise self._error(f"row {index} of {split!r}: column {self._config.prompt_column!r} is null")

    def _check_json(self, rows: "Dataset", numbers: Sequence[int], where: str) -> None:
        """Raise if tools or variables given as JSON text are unusable. Other columns are typed, so row 0 is enough."""
        for column in rows.column_names:
            key = self._config.columns.get(column, column)
            is_text = "string" in getattr(rows.features[column], "dtype", "")
            if key in (TOOLS, VARIABLES) and is_text:
                selected: Any = rows.select_columns([column])  # annotated as Dataset | DatasetDict, and batches as rows
                values = (value for batch in selected.iter(ROWS_AT_A_TIME) for value in batch[column])
                for number, value in zip(numbers, values, strict=True):
                    PLAIN.arguments({key: value}, f"{where} row {number}")

    def _check_columns(self, rows: AnyRows, split: str) -> None:
        """Raise if a split has no rows, or if row 0 lacks a column that the config names for this split."""
        if not len(rows):
            raise self._error(f"no rows (split {split!r})")
        first = rows[0]
        named = [("prompt_column", self._config.prompt_column)]
        named += [("columns", column) for column in self._config.columns]
        for key, column in named:
            if column not in first:
                raise self._error(f"{key}: no column {column!r}; the data has: {', '.join(map(str, first))}")

    def _read_file(self, path: Path, split: str) -> list[Item]:
        if self._config.subset is not None:
            raise self._error(f"subset={self._config.subset!r} does not apply to a local file; remove it")
        if self._config.split != DEFAULT_SPLIT:
            rule = "does not apply to a local file; set name to the file of that split"
            raise self._error(f"split={self._config.split!r} {rule}")
        if path.suffix.lower() not in READERS:
            raise self._error(f"eval_split={split!r}: `name` is a file, so this must be one too: {', '.join(READERS)}")
        try:
            return read_file(path)
        except ConfigError as error:
            raise self._error(f"cannot read {error}") from error

    def _load_hub(self, split: str) -> "Dataset":
        from datasets import DatasetDict, load_dataset, load_from_disk

        with errors_named(f"environments {self._name!r}: cannot load split {split!r}"):
            if not any((Path(self._config.name) / mark).is_file() for mark in SAVED_TO_DISK):
                return load_dataset(self._config.name, self._config.subset, split=split)
            saved = load_from_disk(self._config.name)
            if isinstance(saved, DatasetDict):
                return saved[split]
            if split != DEFAULT_SPLIT:
                raise ValueError("the folder holds a dataset without splits")
            return saved

    def _error(self, message: str) -> EnvironmentSetupError:
        return EnvironmentSetupError(f"environments {self._name!r}: {message}")


def num_held_out(wanted: int | None, rows: int) -> int:
    """Return how many rows at the end are held out if there is no eval_split. wanted: held_out. rows: of the data."""
    return min(MAX_HELD_OUT, rows // 10) if wanted is None else wanted


DIGEST_ROWS = 64
"""Rows that are hashed per dataset. A resume detects changed data by these rows, without reading all rows."""


class RowStream(SequenceStream):
    """Rows of a dataset, epoch after epoch. With a seed, each epoch is shuffled differently."""

    def __init__(self, name: str, rows: AnyRows, to_item: Callable[[int], Item], seed: int | None) -> None:
        """seed: None keeps the order of the data."""
        size = self.max_attempts = len(rows)
        super().__init__(lambda start: (to_item(row) for row in row_indices(size, seed, start)))
        self._name = name
        self._content = {"rows": size, "content": sample_digest(rows)}

    def state_dict(self) -> JsonObject:
        return super().state_dict() | self._content

    def load_state_dict(self, state: JsonObject) -> None:
        size = self._content["rows"]
        if state["rows"] != size:
            problem = f"the checkpoint was saved with {state['rows']} training rows and there are {size} now"
        elif state["content"] != self._content["content"]:
            problem = f"the {size} training rows differ from those of the checkpoint"
        else:
            super().load_state_dict(state)
            return
        raise EnvironmentSetupError(f"environments {self._name!r}: {problem}; an exact resume needs the same data")


def sample_digest(rows: AnyRows) -> str:
    """Hash evenly spaced rows; hashing every row of a large dataset would take too long."""
    hashed = blake2b(digest_size=8)
    for step in range(DIGEST_ROWS):
        hashed.update(json_bytes(rows[step * (len(rows) - 1) // (DIGEST_ROWS - 1)]))
    return hashed.hexdigest()


def row_indices(size: int, seed: int | None, start: int) -> Iterator[int]:
    """Yield the indices of the rows from a position on, in passes over `size` rows."""
    first, skipped = divmod(start, size)
    for epoch in count(first):
        order: Sequence[int] = range(size)
        if seed is not None:
            order = [*order]
            Random(f"{seed}:{epoch}").shuffle(order)
        yield from order[skipped if epoch == first else 0 :]
