"""Reports the line of user code that blocks a run. Code that hangs on one rank stops all ranks without an error."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import colocated_grpo

FIRST_REPORT_SECONDS = 60.0
"""Time in one frame before the first report. The interval doubles with each report."""
POLL_SECONDS = 1.0
PACKAGE = str(Path(colocated_grpo.__file__).parent)
LIBRARIES = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


class BlockingCodeReporter:
    """A thread that samples the stack of another thread and reports user code that does not return.

    Rewards and episodes have timeouts. User code for prompts, batches and games runs in the main thread without one.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        *,
        first: float = FIRST_REPORT_SECONDS,
        poll: float = POLL_SECONDS,
        thread: int | None = None,
    ) -> None:
        """`thread` is the identifier of the watched thread; None watches the calling one."""
        self._report, self._first, self._poll = report, first, poll
        self._watched = threading.get_ident() if thread is None else thread
        self._done = threading.Event()
        threading.Thread(target=self._watch, name="blocking code", daemon=True).start()

    def close(self) -> None:
        self._done.set()

    def _watch(self) -> None:
        frame_id, since, due = 0, 0.0, 0.0
        while not self._done.wait(self._poll):
            frame = innermost_user_frame(sys._current_frames().get(self._watched))
            now = time.monotonic()
            if frame is None or id(frame) != frame_id:
                frame_id, since, due = id(frame), now, self._first
            elif now - since >= due:
                place = f"blocked for {now - since:.0f} s in {format_frame(frame)}"
                self._report(f"{place}; the run continues when this code returns")
                due *= 2
            del frame  # a reference would keep the user's objects alive


def innermost_user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the first frame from `frame` outwards that is not a library's, or None if it belongs to this package."""
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_filename.startswith(PACKAGE + os.sep) else frame


def format_frame(frame: FrameType) -> str:
    """Return 'my_rewards.py:12 (judge)', with a relative path below the working folder."""
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
