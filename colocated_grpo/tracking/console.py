"""Console output of a run: a live table with a progress bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import atexit
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from colocated_grpo.tracking.table import Row, step_table, step_text
from colocated_grpo.tracking.text import duration, printable

STEPS_SHOWN = 12
ETA_STEPS = 20
"""Steps averaged for the time left: enough to include an evaluation, few enough to follow growing completions."""
SHORTEST_PHASE = 0.1
"""Seconds; shorter phases of the start get no line."""


class Display(Protocol):
    """Console output. `row` holds the metrics of a training step and those of the latest evaluation."""

    def phase_begins(self, name: str) -> None: ...
    def phase_lasts(self, name: str) -> None: ...
    def phase_ends(self, name: str, seconds: float) -> None: ...
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

    def phase_begins(self, name: str) -> None:
        self._show(lambda display: display.phase_begins(name))

    def phase_lasts(self, name: str) -> None:
        self._show(lambda display: display.phase_lasts(name))

    def phase_ends(self, name: str, seconds: float) -> None:
        self._show(lambda display: display.phase_ends(name, seconds))

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

    def phase_begins(self, name: str) -> None:
        pass

    def phase_lasts(self, name: str) -> None:
        self.note(f"{name} ...")

    def phase_ends(self, name: str, seconds: float) -> None:
        if seconds >= SHORTEST_PHASE:
            self.note(_phase_text(name, seconds))

    def open(self, facts: dict[str, str], first_step: int) -> None:
        self.note(_title(first_step))
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self.note(f"  {name:<{width}}  {value}")
        self._eta.start()

    def step(self, step: int, row: Row) -> None:
        left = self._eta.tick(step)
        self._line(f"step {step:>{len(str(self._total))}}/{self._total}", step_text(row), f"{left} left")

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
        self._phase: Progress | None = None
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

    def phase_begins(self, name: str) -> None:
        self._phase = Progress(
            SpinnerColumn(), TextColumn(name), TimeElapsedColumn(), console=self._console, transient=True
        )
        self._phase.add_task(name, total=None)
        atexit.register(self._phase.stop)
        self._phase.start()

    def phase_lasts(self, name: str) -> None:
        pass  # the spinner shows it

    def phase_ends(self, name: str, seconds: float) -> None:
        self._stop_spinner()
        if seconds >= SHORTEST_PHASE:
            self.note(_phase_text(name, seconds))

    def _stop_spinner(self) -> None:
        if self._phase is not None:
            self._phase.stop()
            atexit.unregister(self._phase.stop)
            self._phase = None

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
        self._stop_spinner()
        self._live.stop()
        atexit.unregister(self._live.stop)

    def _render(self) -> Group:
        return (
            Group(step_table(self._rows, self._console.width), self._progress) if self._rows else Group(self._progress)
        )


def make_display(mode: str, console: Console, total_steps: int) -> Display:
    """Return the display for `mode` (tracking.console).

    "auto" is live on a terminal with cursor control, and one updated table in a notebook.
    """
    # Imported here, because it shows this module's columns.
    from colocated_grpo.tracking.notebook import NotebookDisplay, in_notebook, updating_output

    if mode == "auto" and in_notebook():
        return NotebookDisplay(updating_output(), total_steps)
    live = mode == "live" or (mode == "auto" and console.is_terminal and not console.is_dumb_terminal)
    display = LiveDisplay(console, total_steps) if live else PlainDisplay(console, total_steps)
    return FailSafeDisplay(display, console)


def _phase_text(name: str, seconds: float) -> str:
    return f"{name}: {seconds:.1f} s"


def _title(first_step: int) -> str:
    return f"colocated GRPO, resumed at step {first_step}" if first_step else "colocated GRPO"


def _banner(title: str, facts: dict[str, str]) -> Panel:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column()
    for name, value in facts.items():
        grid.add_row(Text(name), Text(printable(value)))
    return Panel(grid, title=Text(title, style="bold"), title_align="left", box=box.ROUNDED, expand=False)
