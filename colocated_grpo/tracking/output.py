"""The text of a run: on the console, and in run.log of the run folder. Output before the folder is known is kept in
memory until then."""

import io
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from rich.console import Console

from colocated_grpo.tracking.console import PlainDisplay, Row, StandardOutput, make_display

LOG_FILE = "run.log"
LOGGER = "colocated_grpo"
"""Parent of this package's loggers; their warnings go to run.log too."""
PATIENCE = 5.0
"""Seconds after which a plain console shows an unfinished phase."""


class LogFile(io.StringIO):
    """Text that is kept in memory until `open_at` names its file."""

    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()
        self._file: TextIO | None = None
        self._handler = logging.StreamHandler(self)
        self._handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logging.getLogger(LOGGER).addHandler(self._handler)

    def leave_logger(self) -> None:
        """Receive no more warnings."""
        logging.getLogger(LOGGER).removeHandler(self._handler)

    def open_at(self, path: Path) -> None:
        """Append the text so far and all later text to the file. A second call has no effect."""
        if self._file is None:
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
            self._file.write(self.getvalue())

    def write(self, text: str) -> int:
        return super().write(text) if self._file is None else self._file.write(text)


class RunOutput:
    """Output of rank 0. On other ranks it has no displays and prints nothing.

    A display whose terminal, pipe or file has closed is dropped, so that it does not end the run.
    """

    def __init__(
        self, displays: Sequence[PlainDisplay] = (), log: LogFile | None = None, *, patience: float = PATIENCE
    ):
        self._displays = list(displays)
        self._log = log
        self._patience = patience
        self.phase_name: str | None = None
        """The unfinished phase of the start."""
        self.folder: Path | None = None
        """The run folder, once it is locked for this run."""
        self.trains = False
        """The start is over."""

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Show a phase of the start, and its seconds when it is finished."""
        self.phase_name, begin = name, time.monotonic()
        lasting = threading.Timer(self._patience, self._phase_lasts, [name])
        lasting.daemon = True
        lasting.start()
        self._show(lambda display: display.phase_begins(name))
        try:
            yield
        finally:
            lasting.cancel()
        self._show(lambda display: display.phase_ends(name, time.monotonic() - begin))
        self.phase_name = None  # after an exception the name stays: the run has failed in this phase

    def _phase_lasts(self, name: str) -> None:
        if self.phase_name == name:
            self._show(lambda display: display.phase_lasts(name))

    def stop_line(self) -> str:
        phase = f" ({self.phase_name})" if self.phase_name else ""
        return f"stopped during start-up{phase}, before the first step"

    def open(self, facts: dict[str, str], first_step: int) -> None:
        """Show the banner; steps follow."""
        self._show(lambda display: display.open(facts, first_step))

    def step(self, step: int, row: Row) -> None:
        self._show(lambda display: display.step(step, row))

    def note(self, line: str) -> None:
        self._show(lambda display: display.note(line))

    def close(self) -> None:
        """Restore the terminal. Lines may still be shown."""
        self._show(lambda display: display.close())
        if self._log is not None:
            self._log.leave_logger()

    def _show(self, show: Callable[[PlainDisplay], None]) -> None:
        for display in list(self._displays):
            try:
                show(display)
            except (OSError, ValueError) as error:
                # ValueError: user code has closed the stdout that is written to.
                if isinstance(error, ValueError) and not display.console.file.closed:
                    raise
                self._displays.remove(display)

    def write_log(self, folder: Path) -> None:
        """Write the text so far, and all later text, to run.log in `folder`."""
        if self._log is not None:
            with suppress(OSError):
                self._log.open_at(folder / LOG_FILE)


def make_output(mode: str, total_steps: int, *, is_main: bool, console: Console | None = None) -> RunOutput:
    """Return the output of rank 0 (`is_main`), or the silent one of other ranks. mode: tracking.console."""
    if not is_main:
        return RunOutput()
    log = LogFile()
    logged = PlainDisplay(Console(file=log), total_steps)
    logged.note(f"--- started at {datetime.now(UTC).isoformat(timespec='seconds')}")
    return RunOutput([make_display(mode, console or StandardOutput(), total_steps), logged], log)
