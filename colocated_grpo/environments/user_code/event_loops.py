"""Event loops for coroutines of user code, each on its own thread. A blocked loop can be retired and replaced."""

import asyncio
import threading
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import TypeVar
from weakref import WeakKeyDictionary

Entered = TypeVar("Entered")

GRACE = 2.0
"""A loop that runs no callback for this many seconds counts as blocked."""


def start_loop(name: str) -> asyncio.AbstractEventLoop:
    """Run a new event loop on a daemon thread called `name`."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=[loop], name=name, daemon=True).start()
    return loop


def retire_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Stop the loop and its thread once its last task has ended, so that a long run does not accumulate threads."""
    asyncio.run_coroutine_threadsafe(_stop_when_idle(), loop)


_entered: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncExitStack] = WeakKeyDictionary()


async def enter_for_loop(context: AbstractAsyncContextManager[Entered]) -> Entered:
    """Enter a context on the running loop of `start_loop`. It is exited when the loop is retired."""
    stack = _entered.setdefault(asyncio.get_running_loop(), AsyncExitStack())
    return await stack.enter_async_context(context)


class ReusableLoop:
    """One loop for calls from many threads.

    All calls share a loop because an HTTP client of user code works only on the loop that first used it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        """Return the running loop. The first call starts it."""
        with self._lock:
            if self._loop is None:
                self._loop = start_loop(self._name)
            return self._loop

    def retire_if_blocked(self) -> None:
        """Retire the loop if it runs no callback within GRACE. Later calls then start a new loop instead of hanging."""
        with self._lock:
            if self._loop is None:
                return
            responded = threading.Event()
            self._loop.call_soon_threadsafe(responded.set)
            if not responded.wait(GRACE):
                retire_loop(self._loop)
                self._loop = None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    stopped = False
    while not stopped:
        # asyncio re-raises these two exceptions from run_forever(), which would end all other tasks. The caller that
        # awaits the task receives the exception.
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
            stopped = True
    loop.close()


async def _stop_when_idle() -> None:
    """Stop the running loop when no other task is left."""
    loop = asyncio.get_running_loop()
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    try:
        await _entered.pop(loop, AsyncExitStack()).aclose()
    finally:
        loop.stop()
