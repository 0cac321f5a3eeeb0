"""Reports the line of running user code, and ends the process if user code blocks all threads.

Standard library only, because the launcher reads the stacks written by a blocked rank.
"""

import faulthandler
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import takewhile
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import NamedTuple

PACKAGE = str(Path(__file__).parents[1])
MODEL_CODE = f"{os.sep}transformers_modules{os.sep}"
"""Part of the path of model code downloaded by transformers. Its forward pass is not user code."""
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
DUMPED = "Timeout ("
"""Start of faulthandler's output on timeout."""
MIN_SECONDS = 10.0
"""Lower bound of the time limit: compiling a kernel during a reward may hold the interpreter lock for seconds."""
FIRST_REPORT_SECONDS = 60.0
"""Seconds in the same line of code before the first report. The interval doubles with each report."""
POLL_SECONDS = 1.0


class Line(NamedTuple):
    """A line of code that is running or has raised an exception."""

    file: str
    number: int
    function: str
    frame: int = 0
    """id() of the frame, for a running line."""

    @property
    def place(self) -> str:
        return f"{os.path.basename(self.file)}, line {self.number}"

    def __str__(self) -> str:
        return f"{self.function} ({self.place})"

    def is_ours(self) -> bool:
        return self.file.startswith(PACKAGE + os.sep)


@cache
def foreign() -> tuple[str, ...]:
    """Return path prefixes of files that are not user code: libraries and this package."""
    return ("<", PACKAGE + os.sep, *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))


def is_user_code(file: str) -> bool:
    return not file.startswith(foreign()) and MODEL_CODE not in file


def innermost(lines: Iterable[Line]) -> Line | None:
    """Return the first line of user code. lines: from the innermost frame outwards."""
    found: Line | None = None
    for line in lines:
        if found is None and is_user_code(line.file):
            found = line
        # A comprehension has its own frame; the enclosing function is more informative.
        if found is not None and line.file == found.file and line.function not in COMPREHENSIONS:
            return found._replace(function=line.function)
    return found


def lines_of_error(error: BaseException) -> list[Line]:
    """Return the lines of a traceback, innermost first."""
    return [_line(frame, number) for frame, number in walk_tb(error.__traceback__)][::-1]


def line_of_thread(identifier: int | None) -> Line | None:
    """Return a thread's current line of user code; None if the thread runs code of this package, or has ended."""
    frame = sys._current_frames().get(identifier or 0)
    return None if frame is None else line_of_frame(frame)


def line_of_frame(frame: FrameType) -> Line | None:
    """Return the frame's current line of user code; None if it runs code of this package."""
    return _called(_line(each, number) for each, number in walk_stack(frame))


def lines_in_dump(text: str) -> list[Line]:
    """Return the lines of user code in faulthandler's thread stacks, without duplicates."""
    threads = [
        [Line(file, int(number), name) for file, number, name in FRAME.findall(part)] for part in text.split("\n\n")
    ]
    return list(dict.fromkeys(line for lines in threads if (line := _called(lines)) is not None))


def _line(frame: FrameType, number: int) -> Line:
    return Line(frame.f_code.co_filename, number, frame.f_code.co_name, id(frame))


def _called(lines: Iterable[Line]) -> Line | None:
    """Return the innermost line of user code called by this package, excluding scripts that call this package."""
    return innermost(takewhile(lambda line: not line.is_ours(), lines))


class UserCodeWatch:
    """A thread that ends this process if user code blocks it.

    Timeouts of rewards and episodes are enforced by other threads. Code that holds the interpreter lock, such as a
    regular expression that backtracks for hours, blocks those threads too. While rewards and episodes run, this thread
    therefore keeps resetting a timer of faulthandler. If this thread is blocked for longer than the limit,
    faulthandler's own thread, which needs no lock, writes the stacks of all threads and ends the process.

    User code for prompts, batches and games runs in the main thread without a timeout. If a line of this code does not
    return, the thread only reports the line.
    """

    def __init__(self, seconds: float, setting: str, report: Callable[[str], None], stacks: Path | None = None) -> None:
        """seconds: the limit, from `setting`. stacks: a file for the launcher; None: standard error.

        Call from the thread whose lines are passed to `report`.
        """
        self._seconds = max(seconds, MIN_SECONDS)
        self._report = report
        self._stacks = None if stacks is None else stacks.open("w", encoding="utf-8")
        if self._stacks is not None:
            self._stacks.write(f"{setting}\n")
            self._stacks.flush()
        self._lock = threading.Lock()
        self._running = 0
        self._is_set = False
        self._watched = threading.get_ident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="user code", daemon=True)
        self._thread.start()
        _watches.append(self)

    @contextmanager
    def limited(self) -> Generator[None]:
        """Context of user code that must not hold the interpreter lock for long. Several threads may enter it."""
        with self._lock:
            self._running += 1
            if not self._is_set:
                self._set_timer()
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1  # the thread cancels the timer: calls are many, and each timer costs a thread

    def close(self) -> None:
        _watches.remove(self)
        self._done.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._stacks is not None:
            self._stacks.close()
            Path(self._stacks.name).unlink(missing_ok=True)

    def _set_timer(self) -> None:
        stream = sys.__stderr__ if self._stacks is None else self._stacks
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=stream or 2)
        self._is_set = True

    def _watch(self) -> None:
        frame, since, due = 0, 0.0, 0.0
        while not self._done.wait(POLL_SECONDS):
            with self._lock:
                if self._running:
                    self._set_timer()
                elif self._is_set:
                    faulthandler.cancel_dump_traceback_later()
                    self._is_set = False
            line, now = line_of_thread(self._watched), time.monotonic()
            if line is None or line.frame != frame:
                frame, since, due = 0 if line is None else line.frame, now, FIRST_REPORT_SECONDS
            elif now - since >= due:
                self._report(f"blocked for {now - since:.0f} s in {line}; the run continues when this code returns")
                due *= 2


_watches: list[UserCodeWatch] = []
"""The watch of this process's run; empty without a run."""


def limited() -> AbstractContextManager[None]:
    """Return the context of a reward or an episode, with the run's limit."""
    return _watches[-1].limited() if _watches else nullcontext()


def explain_blocked(stacks: Path) -> str | None:
    """Return the error line for a rank that wrote its stacks because user code blocked its threads."""
    try:
        setting, _, dump = stacks.read_text(encoding="utf-8", errors="replace").partition("\n")
    except OSError:
        return None
    if not dump.startswith(DUMPED):
        return None
    places = " or ".join(map(str, lines_in_dump(dump))) or "a library"
    return (
        f"error: {setting}: no thread of rank {stacks.stem.removeprefix('rank_')} could run, because {places} holds "
        "Python's interpreter lock; the rank was ended; --resume auto continues from the last checkpoint"
    )
