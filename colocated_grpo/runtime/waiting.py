"""Says which line of the user's code a run waits for: code that hangs would stop all ranks in silence."""

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

FIRST_TOLD = 60.0
"""Seconds; told again after twice as long each time."""
POLL_SECONDS = 1.0
OURS = str(Path(colocated_grpo.__file__).parent)
LIBRARIES = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


class SlowCodeTeller:
    """A thread that looks where another one, by default that which makes it, is at work.

    Rewards and episodes have timeouts; prompts, batches and games of the user's own run in the main thread.
    """

    def __init__(
        self, tell: Callable[[str], None], *, first: float = FIRST_TOLD, poll: float = POLL_SECONDS, thread: int = 0
    ) -> None:
        self._tell, self._first, self._poll = tell, first, poll
        self._watched = thread or threading.get_ident()
        self._done = threading.Event()
        threading.Thread(target=self._watch, name="slow code", daemon=True).start()

    def close(self) -> None:
        self._done.set()

    def _watch(self) -> None:
        place, since, due = 0, 0.0, 0.0
        while not self._done.wait(self._poll):
            frame = users_frame(sys._current_frames().get(self._watched))
            now = time.monotonic()
            if frame is None or id(frame) != place:
                place, since, due = id(frame), now, self._first
            elif now - since >= due:
                self._tell(f"waiting for {spelled(frame)} for {now - since:.0f} s now; the run goes on when it returns")
                due *= 2
            del frame  # it would keep the user's objects alive


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is no library's, where it is the user's; None where it is the trainer's own."""
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_filename.startswith(OURS + os.sep) else frame


def spelled(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
