"""The numbers of a step as text: one line, or a row of a table that drops columns until it fits the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from colocated_grpo.tracking.text import number

MIN_PHASE_SHARE = 0.02
"""Phases below this share of a step are omitted from its line."""
GAP = 2
"""Characters from one column to the next, and at both edges of the table together."""

Row = dict[str, float]


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    key: str
    priority: int
    """The column with the largest one is dropped first when the table is wider than the terminal."""


LEARNING_COLUMNS = (
    Column("reward", "reward", 0),
    Column("held-out", "held_out/reward", 1),
    Column("length", "completion_tokens", 3),
    Column("mismatch", "mismatch/kl", 5),
    Column("clip", "clip_fraction/high", 9),
)
COLUMNS = (
    *LEARNING_COLUMNS,
    Column("tok/s", "tokens_per_second", 4),
    Column("s/step", "seconds/step", 2),
    Column("generate", "seconds/generate", 6),
    Column("train", "seconds/train", 7),
    Column("sync", "seconds/sync", 8),
    Column("other", "seconds/other", 10),
    Column("GiB gen", "memory/generate_gib", 11),
    Column("GiB train", "memory/train_gib", 12),
)
PROBLEM_COLUMNS = (
    Column("errors", "reward_errors", 0),
    Column("unscorable", "unscorable", 1),
    Column("dropped", "prompts_dropped", 1),
)
"""Shown only when not 0."""
PHASES_WITH_COLUMN = ("seconds/generate", "seconds/train", "seconds/sync")


def step_table(steps: Sequence[tuple[int, Row]], width: int) -> Table:
    """Return the table of these steps with as many columns as fit into `width` characters."""
    rows = [(step, _with_other(row)) for step, row in steps]
    columns = [column for column in COLUMNS if any(column.key in row for _, row in rows)]
    columns += [column for column in PROBLEM_COLUMNS if any(row.get(column.key) for _, row in rows)]
    cells = {"step": [str(step) for step, _ in rows]}
    cells |= {column.title: [number(row.get(column.key)) for _, row in rows] for column in columns}
    for column in sorted(columns, key=lambda column: column.priority, reverse=True):
        if sum(max(map(len, [title, *texts])) + GAP for title, texts in cells.items()) > width:
            del cells[column.title]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold cyan")
    for title in cells:
        table.add_column(title, justify="right", no_wrap=True, style="bold" if title == "step" else "")
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    return table


def _with_other(row: Row) -> Row:
    """Add seconds/other: time of a step outside the phases that have a column."""
    if "seconds/step" not in row:
        return row
    in_columns = sum(row.get(key, 0.0) for key in PHASES_WITH_COLUMN)
    return {**row, "seconds/other": max(row["seconds/step"] - in_columns, 0.0)}


def step_text(row: Row) -> str:
    """Format the metrics of one step as a single line."""
    figures = [f"{column.title} {number(row[column.key])}" for column in LEARNING_COLUMNS if column.key in row]
    figures += [f"{column.title} {number(row[column.key])}" for column in PROBLEM_COLUMNS if row.get(column.key)]
    if "tokens_per_second" in row:
        figures.append(f"{number(row['tokens_per_second'])} tok/s")
    if "seconds/step" in row:
        shortest = MIN_PHASE_SHARE * row["seconds/step"]
        phases = ", ".join(
            f"{key.removeprefix('seconds/')} {number(seconds)}"
            for key, seconds in row.items()
            if key.startswith("seconds/") and key != "seconds/step" and seconds >= shortest
        )
        figures.append(f"{number(row['seconds/step'])} s" + (f" ({phases})" if phases else ""))
    # torch's own peaks (memory/*_torch_gib) count memory that the sleeping engine has released.
    memory = [row[key] for key in ("memory/generate_gib", "memory/train_gib") if key in row]
    if memory:
        figures.append(f"{number(max(memory))} GiB")
    return "  ".join(figures)
