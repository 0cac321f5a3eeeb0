"""The engines of all ranks as one, for the event loop of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from colocated_grpo.rollout.engine import Request
from colocated_grpo.rollout.inbox import OnDelta
from colocated_grpo.types import Completion

T = TypeVar("T")
Send = Callable[[Request, OnDelta | None], "Future[Completion]"]


class Unserved(Exception):
    """The engine gave this request up: the run is ending."""


class LeastBusy:
    """Each request goes to the engine with the fewest under way. For one event loop."""

    def __init__(self, engines: Sequence[Send]) -> None:
        self._engines = engines
        self.under_way = [0] * len(engines)
        self.closed = False
        """Set by whoever ends the run: no engine will be driven again."""

    async def send(
        self, request: Request, listen: OnDelta | None = None, then: Callable[[Completion], None] | None = None
    ) -> Completion:
        """Cancelling it takes the request out of its engine. Raises Unserved when the run ends before it is done.

        then: is told the completion on the engine's own thread, before that may sleep; the engine is the first one.
        """
        if self.closed:
            raise Unserved
        chosen = min(range(len(self._engines)), key=self.under_way.__getitem__) if then is None else 0
        self.under_way[chosen] += 1
        try:
            future = self._engines[chosen](request, listen)
            if then is not None:
                future.add_done_callback(lambda f: None if f.cancelled() or f.exception() else then(f.result()))
            return await outcome(future)
        finally:
            self.under_way[chosen] -= 1


async def outcome(future: Future[T]) -> T:
    """Cancelling it cancels the future. Raises Unserved where the engine has done that: the run is ending."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():
            raise
        raise Unserved from None
