"""Progress in a notebook: one table under the cell, replaced after every step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from colocated_grpo.tracking.console import SHORTEST_PHASE, STEPS_SHOWN, Eta
from colocated_grpo.tracking.table import COLUMNS, PROBLEM_COLUMNS, Row
from colocated_grpo.tracking.text import as_html, number

Show = Callable[[str], None]
"""Shows HTML, in place of what it showed before."""


def in_notebook() -> bool:
    """Return True in a kernel of Jupyter, which renders HTML; False in IPython's terminal."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def updating_output() -> Show:
    """Return a function that shows HTML under the running cell, and replaces it in later calls."""
    from IPython.display import HTML, display  # pyrefly: ignore[missing-import]  (comes with every notebook)

    handles: list[Any] = []

    def show(html: str) -> None:
        if handles:
            handles[0].update(HTML(html))
        else:
            handles.append(display(HTML(html), display_id=True))

    return show


class NotebookDisplay:
    """Progress bar and the last steps as an HTML table; facts and notes as printed lines."""

    def __init__(self, show: Show, total_steps: int) -> None:
        self._show = show
        self._total = total_steps
        self._eta = Eta(total_steps)
        self._rows: list[tuple[int, Row]] = []

    def phase_begins(self, name: str) -> None:
        """Do nothing: most phases take a moment."""

    def phase_lasts(self, name: str) -> None:
        self.note(f"{name} ...")

    def phase_ends(self, name: str, seconds: float) -> None:
        if seconds >= SHORTEST_PHASE:
            self.note(f"{name}: {seconds:.1f} s")

    def open(self, facts: dict[str, str], first_step: int) -> None:
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self.note(f"{name:<{width}}  {value}")
        if first_step:
            self.note(f"resumed at step {first_step}")
        self._eta.start()

    def step(self, step: int, row: Row) -> None:
        self._rows = [*self._rows, (step, row)][-STEPS_SHOWN:]
        progress = f"step {step + 1} of {self._total}, {self._eta.tick(step)} left"
        bar = f'<progress value="{step + 1}" max="{self._total}"></progress> {as_html(progress)}'
        self._show(f"<div>{bar}{self._table()}</div>")

    def note(self, line: str) -> None:
        print(line, flush=True)

    def close(self) -> None:
        """Do nothing: the table stays in the notebook."""

    def _table(self) -> str:
        columns = [column for column in COLUMNS if any(column.key in row for _, row in self._rows)]
        columns += [column for column in PROBLEM_COLUMNS if any(row.get(column.key) for _, row in self._rows)]
        head = "".join(f"<th>{as_html(title)}</th>" for title in ("step", *(column.title for column in columns)))
        lines = (
            "".join(f"<td>{as_html(cell)}</td>" for cell in (step, *(number(row.get(c.key)) for c in columns)))
            for step, row in self._rows
        )
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
