"""Event loops for coroutines of user code, each on its own thread; one that is blocked can be left behind."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

GRACE = 2.0
"""Seconds after which a loop that has done nothing of what it was asked to do counts as blocked."""


def start_loop(name: str) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=[loop], name=name, daemon=True).start()
    return loop


def leave_loop(loop: asyncio.AbstractEventLoop) -> None:
    """It goes on until its last task has ended, or a long run would pile up threads and sockets."""
    asyncio.run_coroutine_threadsafe(_stop_when_idle(), loop)


class SharedLoop:
    """One loop for many threads: HTTP clients of user code belong to the loop that first used them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = start_loop(self._name)
            return self._loop

    def leave_if_blocked(self) -> None:
        """Later callers get a new loop where this one does not answer: whatever is sent to it would wait with it."""
        with self._lock:
            if self._loop is None:
                return
            answered = threading.Event()
            self._loop.call_soon_threadsafe(answered.set)
            if not answered.wait(GRACE):
                leave_loop(self._loop)
                self._loop = None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    stopped = False
    while not stopped:
        # Whoever awaits the task is told as well; out of the loop it would end every other task with it.
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
            stopped = True
    loop.close()


async def _stop_when_idle() -> None:
    """Stops the loop that it runs on."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    asyncio.get_running_loop().stop()
