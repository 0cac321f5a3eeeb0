"""Console output of a run: a live table on a terminal, one line per step elsewhere."""

import atexit
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from colocated_grpo.tracking.text import duration, figure, number, printable

MIN_PHASE_SHARE = 0.02
"""Phases below this share of a step are omitted from its line."""
GAP = 2
"""Characters between two columns, and at both edges of the table together."""

MISMATCH = "mismatch/kl"

Row = dict[str, float]
STEPS_SHOWN = 12
ETA_STEPS = 20
"""Steps averaged for the time left: enough to include an evaluation, few enough to follow growing completions."""
SHORTEST_PHASE = 0.1
"""Seconds; shorter phases of the start get no line."""


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    key: str
    priority: int
    """The column with the largest priority is dropped first when the table is wider than the terminal."""


LEARNING_COLUMNS = (
    Column("reward", "reward", 0),
    Column("held-out", "held_out/reward", 1),
    Column("length", "completion_tokens", 3),
    Column("kl", "kl", 5),
    Column("mismatch", MISMATCH, 5),
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
    cells |= {column.title: [figure(row, column.key) for _, row in rows] for column in columns}
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
    figures = [f"{column.title} {figure(row, column.key)}" for column in LEARNING_COLUMNS if column.key in row]
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


class StandardOutput(Console):
    """A rich console bound to the current sys.stdout, so that user code may replace sys.stdout later."""

    def __init__(self) -> None:
        super().__init__(file=sys.stdout)

    def on_broken_pipe(self) -> None:
        raise  # rich would exit the process; RunOutput handles the BrokenPipeError


class PlainDisplay:
    """One line per step, for logs and pipes. `row` has the metrics of a step and of the latest evaluation."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self.console = console
        self._total = total_steps
        self._finished_at = deque([time.monotonic()], maxlen=ETA_STEPS + 1)

    def phase_begins(self, name: str) -> None:
        """Do nothing: most phases take a moment."""

    def phase_lasts(self, name: str) -> None:
        self.note(f"{name} ...")

    def phase_ends(self, name: str, seconds: float) -> None:
        if seconds >= SHORTEST_PHASE:
            self.note(f"{name}: {seconds:.1f} s")

    def open(self, facts: dict[str, str], first_step: int) -> None:
        if first_step:
            self.note(f"resumed at step {first_step}")
        self._show_facts(facts)
        self._finished_at = deque([time.monotonic()], maxlen=ETA_STEPS + 1)  # loading and engine start are excluded

    def time_left(self, step: int) -> str:
        """Count one finished step and estimate the time left, from the mean of the last ETA_STEPS steps."""
        self._finished_at.append(time.monotonic())
        mean = (self._finished_at[-1] - self._finished_at[0]) / (len(self._finished_at) - 1)
        return duration(mean * (self._total - step - 1))

    def step(self, step: int, row: Row) -> None:
        left = self.time_left(step)
        parts = f"step {step:>{len(str(self._total))}}/{self._total}", step_text(row), f"{left} left"
        self.note("  ".join(part for part in parts if part))

    def note(self, line: str) -> None:
        # Bypass rich, which would wrap the line at its assumed width.
        print(printable(line, self.console.encoding), file=self.console.file, flush=True)

    def close(self) -> None:
        """Do nothing: nothing is redrawn."""

    def _show_facts(self, facts: dict[str, str]) -> None:
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self.note(f"  {name:<{width}}  {value}")


class LiveDisplay(PlainDisplay):
    """Progress bar and the last steps as a table, redrawn in place."""

    def __init__(self, console: Console, total_steps: int) -> None:
        super().__init__(console, total_steps)
        self._rows: list[tuple[int, Row]] = []
        self._phase: Progress | None = None
        left = TextColumn("{task.fields[left]} left")
        columns = SpinnerColumn(), TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None)
        self._progress = Progress(*columns, TimeElapsedColumn(), left, console=console, expand=True)
        self._bar = self._progress.add_task("", total=total_steps, left="-")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def phase_begins(self, name: str) -> None:
        columns = SpinnerColumn(), TextColumn(name), TimeElapsedColumn()
        self._phase = Progress(*columns, console=self.console, transient=True)
        self._phase.add_task(name, total=None)
        atexit.register(self._phase.stop)
        self._phase.start()

    def phase_lasts(self, name: str) -> None:
        """Do nothing: the spinner shows the phase."""

    def phase_ends(self, name: str, seconds: float) -> None:
        self._stop_spinner()
        super().phase_ends(name, seconds)

    def open(self, facts: dict[str, str], first_step: int) -> None:
        super().open(facts, first_step)
        self._progress.update(self._bar, completed=first_step)
        # After an uncaught exception or sys.exit the terminal would otherwise be left without a cursor.
        atexit.register(self._live.stop)
        self._live.start()

    def step(self, step: int, row: Row) -> None:
        # Make a new list, because the refresh thread may be reading the old list.
        self._rows = [*self._rows, (step, row)][-STEPS_SHOWN:]
        self._progress.update(self._bar, completed=step + 1, left=self.time_left(step))

    def note(self, line: str) -> None:
        self.console.print(Text(printable(line, self.console.encoding)))

    def close(self) -> None:
        self._stop_spinner()
        self._live.stop()
        atexit.unregister(self._live.stop)

    def _show_facts(self, facts: dict[str, str]) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="cyan", no_wrap=True)
        grid.add_column()
        for name, value in facts.items():
            grid.add_row(Text(name), Text(printable(value)))
        self.console.print(grid)

    def _stop_spinner(self) -> None:
        if self._phase is not None:
            self._phase.stop()
            atexit.unregister(self._phase.stop)
            self._phase = None

    def _render(self) -> Group:
        table = [step_table(self._rows, self.console.width)] if self._rows else []
        return Group(*table, self._progress)


def make_display(mode: str, console: Console, total_steps: int) -> PlainDisplay:
    """Return the display for `mode` (tracking.console). "auto" is live on a terminal with cursor control."""
    live = mode == "live" or (mode == "auto" and console.is_terminal and not console.is_dumb_terminal)
    return LiveDisplay(console, total_steps) if live else PlainDisplay(console, total_steps)
