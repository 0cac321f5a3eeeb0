"""Console output of a run: a live table with a progress bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import atexit
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from colocated_grpo.tracking.text import duration, number, printable

STEPS_SHOWN = 12
ETA_STEPS = 20
"""Steps averaged for the time left: enough to include an evaluation, few enough to follow growing completions."""
MIN_PHASE_SHARE = 0.02
"""Phases below this share of a step are omitted from its line."""

Row = dict[str, float]


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    key: str
    minimum_width: int = 0
    """The column is omitted on terminals narrower than this many characters."""


LEARNING_COLUMNS = (
    Column("reward", "reward"),
    Column("held-out", "held_out/reward"),
    Column("length", "completion_tokens"),
    Column("mismatch", "mismatch/kl"),
    Column("clip", "clip_fraction/high", 90),
)
COLUMNS = (
    *LEARNING_COLUMNS,
    Column("tok/s", "tokens_per_second"),
    Column("s/step", "seconds/step"),
    Column("generate", "seconds/generate", 90),
    Column("train", "seconds/train", 90),
    Column("sync", "seconds/sync", 100),
    Column("other", "seconds/other", 110),
    Column("GiB gen", "memory/generate_gib", 120),
    Column("GiB train", "memory/train_gib", 120),
)
PROBLEM_COLUMNS = (Column("errors", "reward_errors"), Column("dropped", "prompts_dropped"))
"""Shown only when not 0."""
PHASES_WITH_COLUMN = ("seconds/generate", "seconds/train", "seconds/sync")


class Display(Protocol):
    """Console output. `row` holds the metrics of a training step and those of the latest evaluation."""

    def open(self, facts: dict[str, str], first_step: int) -> None: ...
    def step(self, step: int, row: Row) -> None: ...
    def note(self, line: str) -> None: ...
    def close(self) -> None: ...


class StandardOutput(Console):
    """A rich console bound to the current sys.stdout, so that user code may replace sys.stdout later."""

    def __init__(self) -> None:
        super().__init__(file=sys.stdout)

    def on_broken_pipe(self) -> None:
        raise  # rich would exit the process; FailSafeDisplay handles the BrokenPipeError


class FailSafeDisplay:
    """Forward to another display until its terminal or pipe closes, so that a closed terminal does not end the run."""

    def __init__(self, display: Display, console: Console) -> None:
        self._display: Display | None = display
        self._console = console

    def open(self, facts: dict[str, str], first_step: int) -> None:
        self._show(lambda display: display.open(facts, first_step))

    def step(self, step: int, row: Row) -> None:
        self._show(lambda display: display.step(step, row))

    def note(self, line: str) -> None:
        self._show(lambda display: display.note(line))

    def close(self) -> None:
        self._show(lambda display: display.close())

    def _show(self, show: Callable[[Display], None]) -> None:
        if self._display is not None:
            try:
                show(self._display)
            except OSError:
                self._display = None
            except ValueError:
                if not self._console.file.closed:  # writing to a stdout that user code has closed
                    raise
                self._display = None


class Eta:
    """Estimated time left, from the mean of the last ETA_STEPS steps."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._finished_at: deque[float] = deque(maxlen=ETA_STEPS + 1)
        self.start()

    def start(self) -> None:
        """Start timing now. Earlier work (loading, engine start) is excluded."""
        self._finished_at.clear()
        self._finished_at.append(time.monotonic())

    def tick(self, step: int) -> str:
        """Count one finished step and return the time left as text."""
        self._finished_at.append(time.monotonic())
        mean = (self._finished_at[-1] - self._finished_at[0]) / (len(self._finished_at) - 1)
        return duration(mean * (self._total - step - 1))


class PlainDisplay:
    """One line per step, for logs and pipes."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._eta = Eta(total_steps)

    def open(self, facts: dict[str, str], first_step: int) -> None:
        self.note(_title(first_step))
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self.note(f"  {name:<{width}}  {value}")
        self._eta.start()

    def step(self, step: int, row: Row) -> None:
        left = self._eta.tick(step)
        self._line(f"step {step:>{len(str(self._total))}}/{self._total}", _step_text(row), f"{left} left")

    def note(self, line: str) -> None:
        self._line(line)

    def close(self) -> None:
        pass

    def _line(self, *parts: str) -> None:
        # Bypasses rich, which would wrap the line at its assumed width.
        line = "  ".join(part for part in parts if part)
        print(printable(line, self._console.encoding), file=self._console.file, flush=True)


class LiveDisplay:
    """Progress bar and the last steps as a table, redrawn in place."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._eta = Eta(total_steps)
        self._rows: list[tuple[int, Row]] = []
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} left"),
            console=console,
            expand=True,
        )
        self._bar = self._progress.add_task("", total=total_steps, left="-")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def open(self, facts: dict[str, str], first_step: int) -> None:
        self._console.print(_banner(_title(first_step), facts))
        self._progress.update(self._bar, completed=first_step)
        # After an uncaught exception or sys.exit the terminal would otherwise be left without a cursor.
        atexit.register(self._live.stop)
        self._live.start()
        self._eta.start()

    def step(self, step: int, row: Row) -> None:
        # A new list, because the refresh thread may be reading the old one.
        self._rows = [*self._rows, (step, row)][-STEPS_SHOWN:]
        self._progress.update(self._bar, completed=step + 1, left=self._eta.tick(step))

    def note(self, line: str) -> None:
        self._console.print(Text(printable(line, self._console.encoding)))

    def close(self) -> None:
        self._live.stop()
        atexit.unregister(self._live.stop)

    def _render(self) -> Group:
        return Group(self._table(), self._progress) if self._rows else Group(self._progress)

    def _table(self) -> Table:
        columns = [column for column in COLUMNS if self._console.width >= column.minimum_width]
        rows = [(step, _with_other(row)) for step, row in self._rows]
        columns = [column for column in columns if any(column.key in row for _, row in rows)]
        columns += [column for column in PROBLEM_COLUMNS if any(row.get(column.key) for _, row in rows)]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold cyan")
        table.add_column("step", justify="right", style="bold", no_wrap=True)
        for column in columns:
            table.add_column(column.title, justify="right", no_wrap=True)
        for step, row in rows:
            table.add_row(str(step), *(number(row.get(column.key)) for column in columns))
        return table


def make_display(mode: str, console: Console, total_steps: int) -> Display:
    """Return the display for `mode` (tracking.console). "auto" is live on a terminal with cursor control."""
    live = mode == "live" or (mode == "auto" and console.is_terminal and not console.is_dumb_terminal)
    display = LiveDisplay(console, total_steps) if live else PlainDisplay(console, total_steps)
    return FailSafeDisplay(display, console)


def _title(first_step: int) -> str:
    return f"colocated GRPO, resumed at step {first_step}" if first_step else "colocated GRPO"


def _banner(title: str, facts: dict[str, str]) -> Panel:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column()
    for name, value in facts.items():
        grid.add_row(Text(name), Text(printable(value)))
    return Panel(grid, title=Text(title, style="bold"), title_align="left", box=box.ROUNDED, expand=False)


def _with_other(row: Row) -> Row:
    """Add seconds/other: time of a step outside the phases that have a column."""
    if "seconds/step" not in row:
        return row
    in_columns = sum(row.get(key, 0.0) for key in PHASES_WITH_COLUMN)
    return {**row, "seconds/other": max(row["seconds/step"] - in_columns, 0.0)}


def _step_text(row: Row) -> str:
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
    memory = [row[key] for key in row if key.startswith("memory/")]
    if memory:
        figures.append(f"{number(max(memory))} GiB")
    return "  ".join(figures)
