"""Distribution of requests over the engines of all ranks, from the server's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from colocated_grpo.rollout.engine import Request
from colocated_grpo.rollout.inbox import Inbox, OnDelta
from colocated_grpo.servers.rank_links import RankLink
from colocated_grpo.types import Completion

T = TypeVar("T")


class ServerClosing(Exception):
    """The engines have stopped, so the request cannot be completed."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class LoadBalancer:
    """Send each request to the engine with the fewest in flight. Not thread-safe: for one event loop."""

    def __init__(self, inbox: Inbox, links: Sequence[Inbox | RankLink] = ()) -> None:
        """inbox: of this rank's engine. links: to those of the other ranks."""
        self._inbox = inbox
        self._engines = [inbox, *links]
        self.in_flight = [0] * len(self._engines)
        self.closed = False
        """Set when the engines have stopped for good; every later request raises ServerClosing."""

    async def send(
        self,
        request: Request,
        on_delta: OnDelta | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> Completion:
        """Return the completion. Cancellation aborts the request in its engine. Raises ServerClosing.

        on_completion: called on the thread of this rank's engine before that engine may sleep. It restricts the
        request to this engine.
        """
        if self.closed:
            raise ServerClosing
        chosen = min(range(len(self._engines)), key=self.in_flight.__getitem__) if on_completion is None else 0
        self.in_flight[chosen] += 1
        try:
            future = self._engines[chosen].put(request, on_delta)
            if on_completion is not None:
                future.add_done_callback(
                    lambda f: None if f.cancelled() or f.exception() else on_completion(f.result())
                )
            return await result_of(future)
        finally:
            self.in_flight[chosen] -= 1

    def top_logprobs(self, token_ids: list[int], k: int) -> Future[list[dict[int, float]]]:
        """Return the future of `RolloutEngine.top_logprobs` of this rank's engine."""
        return self._inbox.call(lambda engine: engine.top_logprobs(token_ids, k))


async def result_of(future: Future[T]) -> T:
    """Await an engine's future. Cancelling the task cancels the future.

    A future that the engine itself cancelled raises ServerClosing, since engines only do that when they stop.
    """
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None, "coroutines run in a task"
        if task.cancelling():
            raise
        raise ServerClosing from None
