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
from colocated_grpo.runtime.verdict import RUN_ERROR, report

FIRST_REPORT_SECONDS = 60.0
"""Time in one frame before the first report. The interval doubles with each report."""
POLL_SECONDS = 1.0
STOP_SECONDS = 5.0
"""Longest time in user code after a stop request. Callbacks are exempt: they may upload what the run has saved."""
PACKAGE = str(Path(colocated_grpo.__file__).parent)
CALLBACKS = str(Path(PACKAGE) / "callbacks.py")
MODEL_CODE = f"{os.sep}transformers_modules{os.sep}"
"""In the path of model code that transformers has downloaded. Its forward pass is the trainer's own work."""
LIBRARIES = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


class BlockingCodeReporter:
    """A thread that samples the stack of another thread and reports user code that does not return.

    Rewards and episodes have timeouts. User code for prompts, batches and games runs in the main thread without one,
    but it cannot delay the end of a run: the process exits if a stop was requested and the code does not return.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        *,
        first: float = FIRST_REPORT_SECONDS,
        poll: float = POLL_SECONDS,
        thread: int | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        """`thread` is the identifier of the watched thread; None watches the calling one."""
        self._report, self._first, self._poll = report, first, poll
        self._stop_requested = stop_requested
        self._stopping: tuple[FrameType, float] | None = None
        """The call of user code in which a stop request found the thread, and since when."""
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
            self._end_if_stopped(frame, now)
            if frame is None or id(frame) != frame_id:
                frame_id, since, due = id(frame), now, self._first
            elif now - since >= due:
                place = f"blocked for {now - since:.0f} s in {format_frame(frame)}"
                self._report(f"{place}; the run continues when this code returns")
                due *= 2
            del frame  # a reference would keep the user's objects alive

    def _end_if_stopped(self, frame: FrameType | None, now: float) -> None:
        if frame is None or not self._stop_requested():
            self._stopping = None
            return
        call = outermost_user_frame(frame)
        if call.f_back is not None and call.f_back.f_code.co_filename == CALLBACKS:
            return
        if self._stopping is None or self._stopping[0] is not call:
            self._stopping = call, now
        elif now - self._stopping[1] >= STOP_SECONDS:
            reason = f"a stop was requested, and {format_frame(frame)} did not return"
            report(RUN_ERROR, [f"error: {reason}; the rank has ended without a checkpoint"])
            os._exit(RUN_ERROR)


def innermost_user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the first frame from `frame` outwards that is not a library's, or None if it belongs to this package."""
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    return None if frame is None or _is_ours(frame) else frame


def outermost_user_frame(frame: FrameType) -> FrameType:
    """Return the frame of user code, from `frame` outwards, that this package has called."""
    outermost, current = frame, frame.f_back
    while current is not None and not _is_ours(current):
        if not _is_library(current):
            outermost = current
        current = current.f_back
    return outermost


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(LIBRARIES) or MODEL_CODE in frame.f_code.co_filename


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE + os.sep)


def format_frame(frame: FrameType) -> str:
    """Return 'my_rewards.py:12 (judge)', with a relative path below the working folder."""
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
