"""Code of the user's that hangs in the main thread is named; the trainer's own waiting is not."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from colocated_grpo.rollout.inbox import Inbox
from colocated_grpo.runtime.waiting import SlowCodeTeller, users_frame
from tests.support.servers import until

PATIENCE = 20.0


class Work:
    """A thread that works until it is let go."""

    def __init__(self, work: Callable[[Work], None]) -> None:
        self.at_work, self.let_go = threading.Event(), threading.Event()
        self.lines: queue.Queue[str] = queue.Queue()
        self.thread = threading.Thread(target=work, args=(self,), daemon=True)

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.thread.start()
        assert self.at_work.wait(PATIENCE)
        teller = SlowCodeTeller(self.lines.put, first=0.05, poll=0.01, thread=self.thread.ident)
        try:
            yield
        finally:
            teller.close()
            self.let_go.set()
            self.thread.join(PATIENCE)


def hang(work: Work) -> None:
    work.at_work.set()
    work.let_go.wait()


def spin(work: Work) -> None:
    work.at_work.set()
    while not work.let_go.is_set():
        pass


@pytest.mark.parametrize("way", [hang, spin])
def test_users_code_that_does_not_return_is_named_with_its_line_again_and_again(way):
    work = Work(way)
    with work.watched():
        told = [work.lines.get(timeout=PATIENCE) for _ in range(3)]
    for line in told:
        assert (
            line.startswith("waiting for tests/cpu/runtime/test_waiting.py:")
            or "/tests/cpu/runtime/test_waiting.py:" in line
        )
        assert f"({way.__name__}) for 0 s now; the run goes on when it returns" in line


def test_the_trainers_own_waiting_is_nobodys_fault():
    inbox = Inbox()
    thread = threading.Thread(target=inbox.wait, args=(PATIENCE,), daemon=True)

    def frames() -> list[FrameType]:
        """Of the thread, innermost first."""
        frame, found = sys._current_frames()[thread.ident], []
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
        return found

    thread.start()
    until(lambda: any(frame.f_code is Inbox.wait.__code__ for frame in frames()))
    assert users_frame(frames()[0]) is None
    inbox.wake()
    thread.join(PATIENCE)


def test_a_thread_that_has_ended_is_at_no_line():
    assert users_frame(None) is None
