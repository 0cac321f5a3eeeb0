"""Requests to this rank's engine from any thread, and the one thread that drives the engine.

vLLM in this process belongs to the main thread. Whatever runs elsewhere, be it an episode on an event loop or a server,
puts its requests here and waits for their futures.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from colocated_grpo.rollout.engine import Request, RolloutEngine, TokenDelta
from colocated_grpo.types import Completion

PATIENCE = 0.5
"""Seconds that a step without work waits before it gives its caller a chance to see a stop request."""
ENTRY_COST = 3
"""Steps that everybody under way loses when requests enter: theirs has no captured graph, and prompts to read.

Requests that entered one by one, as seats fall free or tools answer, would keep the engine from ever decoding fast
(docs/results/entry_of_requests_1xh200.json). They wait until the seats kept free for them have cost as much as their
entry will, which is at most twice the cost of entering at the best moment ("ski rental").
"""
MOST_STEPS_HELD = 64
"""A request for which there is a seat waits no longer than this for company."""

Call = Callable[[RolloutEngine], Any]
Listen = Callable[[TokenDelta], None]
Finished = list[tuple[Hashable, Completion]]


class Inbox:
    """Thread-safe. Requests wait while the engine sleeps; nothing is lost between rollout phases."""

    def __init__(self) -> None:
        self._requests: deque[tuple[Request, Future[Completion], Listen | None]] = deque()
        self._given_up: deque[tuple[Hashable, Future[Completion]]] = deque()
        self._calls: deque[tuple[Call, Future[Any]]] = deque()
        self._bell = threading.Event()

    def put(self, request: Request, listen: Listen | None = None) -> Future[Completion]:
        """Its key must differ from all others under way. From asyncio: `await asyncio.wrap_future(inbox.put(...))`.

        The future raises ValueError where the engine refuses the request, and CancelledError when the engine gives up
        its work. Cancelling it takes the request out of the engine. Of a request with `stream`, `listen` is told on the
        driving thread, which it must not keep, each piece but what the last step adds.
        """
        future: Future[Completion] = Future()
        future.add_done_callback(lambda done: self._give_up(request.key, done) if done.cancelled() else None)
        self._requests.append((request, future, listen))
        self._bell.set()
        return future

    def call(self, call: Call) -> Future[Any]:
        """`call(engine)` on the driving thread, between two requests: the engine has nothing else to do then.

        The future raises ValueError where the call does.
        """
        future: Future[Any] = Future()
        self._calls.append((call, future))
        self._bell.set()
        return future

    def _give_up(self, key: Hashable, future: Future[Completion]) -> None:
        self._given_up.append((key, future))
        self._bell.set()

    def ring(self) -> None:
        """Wake the driving thread: something else that it waits for has happened."""
        self._bell.set()

    def wait(self, timeout: float) -> None:
        """Until something has come or the bell was rung since the last wait, but no longer than `timeout` seconds."""
        self._bell.wait(timeout)
        # Before the queues are looked at: what comes from now on rings again.
        self._bell.clear()

    def __bool__(self) -> bool:
        return bool(self._requests or self._given_up or self._calls)

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def take(self) -> Iterator[tuple[Request, Future[Completion], Listen | None]]:
        while self._requests:
            yield self._requests.popleft()

    def take_calls(self) -> Iterator[tuple[Call, Future[Any]]]:
        while self._calls:
            yield self._calls.popleft()

    def take_given_up(self) -> Iterator[tuple[Hashable, Future[Completion]]]:
        while self._given_up:
            yield self._given_up.popleft()


class Driver:
    """The engine and its inbox, for the one thread that drives them."""

    def __init__(self, engine: RolloutEngine, inbox: Inbox) -> None:
        self._engine = engine
        self._inbox = inbox
        self._futures: dict[Hashable, Future[Completion]] = {}
        self._listeners: dict[Hashable, Listen] = {}
        """Of the futures that stream."""
        self._line: deque[Request] = deque()
        """Those that wait for seats in the engine and for company, from both sides, in order of arrival."""
        self._steps_held = 0
        """For which the line has not moved although there was a seat."""
        self._seat_steps_lost = 0
        """Seats free for the line, added up over these steps."""
        self.running = 0
        """Requests submitted here or taken from the inbox, and not finished."""

    @property
    def max_num_seqs(self) -> int:
        return self._engine.max_num_seqs

    def submit(self, requests: Sequence[Request]) -> None:
        """Requests of the driving thread itself, whose completions `step` returns."""
        self._line.extend(requests)
        self.running += len(requests)

    def step(self) -> Finished:
        """Serve the inbox, then decode one token for everything under way; what was submitted here and is finished.

        Where there is nothing to decode it waits until something comes, at most PATIENCE.
        """
        finished = self.drain() if self._inbox.has_calls else []
        if self._inbox:
            self._drop_given_up()
            for request, future, listen in self._inbox.take():
                self._admit(request, future, listen)
        if not self.running and not finished:
            self._inbox.wait(PATIENCE)
        return finished + self._decode() if self.running else finished

    def drain(self) -> Finished:
        """End what is under way and answer calls; what comes meanwhile waits. Afterwards the engine may sleep."""
        finished: Finished = []
        self._drop_given_up()
        while self.running:
            finished += self._decode()
            self._drop_given_up()
        for call, future in self._inbox.take_calls():
            self._answer(call, future)
        return finished

    def _answer(self, call: Call, future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call(self._engine))
        except ValueError as error:
            future.set_exception(error)

    def _move_line(self) -> None:
        """Let those at its head into the engine, if waiting has become as dear as their entry or has lasted long."""
        under_way = self.running - len(self._line)
        coming = min(len(self._line), self.max_num_seqs - under_way)
        if not coming:
            return
        self._steps_held += 1
        self._seat_steps_lost += coming
        if self._seat_steps_lost >= ENTRY_COST * under_way or self._steps_held > MOST_STEPS_HELD:
            self._steps_held = self._seat_steps_lost = 0
            for _ in range(coming):
                self._seat(self._line.popleft())

    def _seat(self, request: Request) -> None:
        try:
            self._engine.submit([request])
        except ValueError as error:  # too long for the engine, or sampling that it does not know
            self.running -= 1
            self._listeners.pop(request.key, None)
            future = self._futures.pop(request.key, None)
            if future is None:
                raise
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _decode(self) -> Finished:
        self._move_line()
        finished = self._engine.step()
        self.running -= len(finished)
        if self._listeners:
            self._tell_listeners()
        if not self._futures:
            return finished
        return [(key, completion) for key, completion in finished if not self._resolve(key, completion)]

    def _tell_listeners(self) -> None:
        for key, piece in self._engine.deltas():
            if key in self._listeners:
                self._listeners[key](piece)

    def abort(self) -> None:
        """Give up everything under way; futures are cancelled."""
        self._engine.abort()
        self._line.clear()
        self.running = 0
        waiting = [*self._futures.values(), *(future for _, future, _ in self._inbox.take())]
        waiting += [future for _, future in self._inbox.take_calls()]
        self._futures.clear()
        self._listeners.clear()
        for future in waiting:
            future.cancel()

    def _drop_given_up(self) -> None:
        """Before new requests are admitted: a key that was given up may come again."""
        for key, future in self._inbox.take_given_up():
            if self._futures.get(key) is future:
                del self._futures[key]
                self._listeners.pop(key, None)
                self.running -= 1
                self._take_out(key)

    def _take_out(self, key: Hashable) -> None:
        """Of the line, or of the engine."""
        for request in self._line:
            if request.key == key:
                self._line.remove(request)
                return
        self._engine.abort([key])

    def _admit(self, request: Request, future: Future[Completion], listen: Listen | None) -> None:
        if future.cancelled():
            return
        if request.key in self._futures:
            if future.set_running_or_notify_cancel():  # it may be given up in this very moment
                future.set_exception(ValueError(f"request key {request.key!r} is already under way"))
            return
        self.submit([request])
        self._futures[request.key] = future
        if listen is not None:
            self._listeners[request.key] = listen

    def _resolve(self, key: Hashable, completion: Completion) -> bool:
        """Whether the completion belonged to a future."""
        future = self._futures.pop(key, None)
        if future is None:
            return False
        self._listeners.pop(key, None)
        if future.set_running_or_notify_cancel():
            future.set_result(completion)
        return True
