"""User code that blocks the main thread is reported with its line; waits of the package itself are not."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from colocated_grpo.rollout.inbox import Inbox
from colocated_grpo.runtime.blocking_code import BlockingCodeReporter, innermost_user_frame
from tests.support.paths import ROOT
from tests.support.servers import until

TIMEOUT = 20.0


class Work:
    """A thread that runs `work` until it is released."""

    def __init__(self, work: Callable[[Work], None]) -> None:
        self.started, self.released = threading.Event(), threading.Event()
        self.lines: queue.Queue[str] = queue.Queue()
        self.thread = threading.Thread(target=work, args=(self,), daemon=True)

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.thread.start()
        assert self.started.wait(TIMEOUT)
        reporter = BlockingCodeReporter(self.lines.put, first=0.05, poll=0.01, thread=self.thread.ident)
        try:
            yield
        finally:
            reporter.close()
            self.released.set()
            self.thread.join(TIMEOUT)


def hang(work: Work) -> None:
    work.started.set()
    work.released.wait()


def spin(work: Work) -> None:
    work.started.set()
    while not work.released.is_set():
        pass


@pytest.mark.parametrize("way", [hang, spin])
def test_user_code_that_does_not_return_is_reported_repeatedly_with_its_line(way):
    work = Work(way)
    with work.watched():
        reported = [work.lines.get(timeout=TIMEOUT) for _ in range(3)]
    for line in reported:
        assert line.startswith("blocked for 0 s in ")
        assert "tests/cpu/runtime/test_blocking_code.py:" in line
        assert line.endswith(f" ({way.__name__}); the run continues when this code returns")


BLOCKED = """
import threading
from colocated_grpo.runtime import blocking_code
blocking_code.STOP_SECONDS = 0.2

def prompts():
    while True:
        draw()

def draw():
    threading.Event().wait(0.01)

stop = threading.Event()
blocking_code.BlockingCodeReporter(print, poll=0.02, stop_requested=stop.is_set)
threading.Timer(0.5, stop.set).start()
prompts()
"""


def test_a_stop_ends_a_process_whose_user_code_does_not_return(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(BLOCKED)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=TIMEOUT)
    assert ended.returncode == 1
    assert re.fullmatch(
        r"error: a stop was requested, and .*mine\.py:\d+ \((prompts|draw)\) did not return; "
        r"the rank has ended without a checkpoint\n",
        ended.stderr,
    )


def test_a_wait_of_the_package_itself_is_not_reported():
    inbox = Inbox()
    thread = threading.Thread(target=inbox.wait, args=(TIMEOUT,), daemon=True)

    def frames() -> list[FrameType]:
        """The frames of the thread, innermost first."""
        frame, found = sys._current_frames()[thread.ident], []
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
        return found

    thread.start()
    until(lambda: any(frame.f_code is Inbox.wait.__code__ for frame in frames()))
    assert innermost_user_frame(frames()[0]) is None
    inbox.wake()
    thread.join(TIMEOUT)


def test_a_thread_that_has_ended_has_no_user_frame():
    assert innermost_user_frame(None) is None
