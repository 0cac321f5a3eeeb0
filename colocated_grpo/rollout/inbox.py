"""Thread-safe requests to this rank's engine, and the driver that serves them from the main thread.

vLLM is not thread-safe: only the main thread calls it. Episodes on an event loop and HTTP servers put their requests
into an `Inbox` and wait for futures.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from colocated_grpo.rollout.engine import Finished, Request, RolloutEngine, TokenDelta
from colocated_grpo.types import Completion

IDLE_SECONDS = 0.5
"""Longest wait of a step without work, so that the caller can check for a stop request."""
MAX_STEPS_QUEUED = 64
"""Longest wait, in steps, of a queued request that has a free slot."""

T = TypeVar("T")
OnDelta = Callable[[TokenDelta], None]


class Calls:
    """Thread-safe queue of functions that one thread runs."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: wakes the thread that runs the functions."""
        self._wake = wake
        self._queue: deque[tuple[Callable[..., object], Future[Any]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def submit(self, call: Callable[..., T]) -> Future[T]:
        """Return the future of the result. It raises the exception of the call."""
        future: Future[T] = Future()
        self._queue.append((call, future))
        self._wake()
        return future

    def run(self, *arguments: object) -> None:
        """Call all queued functions. Raises their exceptions, except ValueError, which only the future raises."""
        while self._queue:
            call, future = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, ValueError):
                    raise

    def cancel(self) -> None:
        while self._queue:
            self._queue.popleft()[1].cancel()


def settle(future: Future[T], outcome: T | Exception) -> None:
    """Set the future's result or exception, unless the future was cancelled meanwhile."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class Inbox:
    """Thread-safe queue of requests. Requests stay queued while the engine sleeps."""

    def __init__(self) -> None:
        self._requests: deque[list[tuple[Request, Future[Completion], OnDelta | None]]] = deque()
        """Each list has the requests that were queued by one call. They are taken together."""
        self._cancelled: deque[tuple[Hashable, Future[Completion]]] = deque()
        self._wakeup = threading.Event()
        self.calls = Calls(self.wake)
        """Functions of the engine, such as `top_logprobs`, to be called while no request is running."""

    def put(self, request: Request, on_delta: OnDelta | None = None) -> Future[Completion]:
        """Queue a request, whose key must be unique among running requests. Returns the future of its completion.

        From asyncio: `await asyncio.wrap_future(inbox.put(...))`. The future raises ValueError if the engine rejects
        the request, and CancelledError if the engine aborts all work. Cancelling the future aborts the request.

        on_delta: for requests with `stream`. It is called on the driving thread with new tokens, except the tokens of
        the last step, and must return quickly.
        """
        return self.put_all([(request, on_delta)])[0]

    def put_all(self, entries: Sequence[tuple[Request, OnDelta | None]]) -> list[Future[Completion]]:
        """Queue several requests; see `put`. In one step, the driver takes all of them or none."""
        queued: list[tuple[Request, Future[Completion], OnDelta | None]] = []
        for request, on_delta in entries:
            future: Future[Completion] = Future()
            future.add_done_callback(partial(self._record_cancelled, request.key))
            queued.append((request, future, on_delta))
        self._requests.append(queued)
        self._wakeup.set()
        return [future for _, future, _ in queued]

    def _record_cancelled(self, key: Hashable, future: Future[Completion]) -> None:
        if future.cancelled():
            self._cancelled.append((key, future))
            self._wakeup.set()

    def wake(self) -> None:
        """Wake the driving thread, for events other than requests."""
        self._wakeup.set()

    def wait(self, timeout: float) -> None:
        """Wait until something is queued or `wake` is called since the last wait, at most `timeout` seconds."""
        self._wakeup.wait(timeout)
        # Clear before the queues are read, so that requests queued from now on wake the next wait.
        self._wakeup.clear()

    def __bool__(self) -> bool:
        return bool(self._requests or self._cancelled or self.calls)

    def take(self) -> Iterator[tuple[Request, Future[Completion], OnDelta | None]]:
        while self._requests:
            yield from self._requests.popleft()

    def take_cancelled(self) -> Iterator[tuple[Hashable, Future[Completion]]]:
        while self._cancelled:
            yield self._cancelled.popleft()


class Driver:
    """Steps the engine and serves its inbox. Not thread-safe: used by the main thread only."""

    def __init__(self, engine: RolloutEngine, inbox: Inbox) -> None:
        self._engine = engine
        self._inbox = inbox
        self._futures: dict[Hashable, Future[Completion]] = {}
        self._listeners: dict[Hashable, OnDelta] = {}
        """Functions for new tokens, by key of the request. Only for requests that stream."""
        self._queue: deque[Request] = deque()
        """Requests not yet admitted to the engine, in order of arrival."""
        self._steps_queued = 0
        """Steps since the last admission in which a queued request had a free slot."""
        self._slot_steps_lost = 0
        """Slots free for queued requests, summed over the steps that `_steps_queued` counts."""
        self.running = 0
        """Requests submitted or taken from the inbox, and not finished."""
        self._decoded: Counter[int] = Counter()
        """Engine steps since the last `read_tail`, by the number of running requests."""

    @property
    def max_num_seqs(self) -> int:
        return self._engine.max_num_seqs

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests of the driving thread. `step` returns their completions."""
        self._queue.extend(requests)
        self.running += len(requests)

    def step(self) -> Finished:
        """Serve the inbox, waiting if idle, and take one step of the engine. Returns finished ones of `submit`."""
        finished = self.drain() if self._inbox.calls else []
        if self._inbox:
            self._drop_cancelled()
            for request, future, on_delta in self._inbox.take():
                self._accept(request, future, on_delta)
        if not self.running and not finished:
            self._inbox.wait(IDLE_SECONDS)
        return finished + self._decode() if self.running else finished

    def drain(self) -> Finished:
        """Finish all running requests and answer calls, so that the engine may sleep. New requests stay queued."""
        finished: Finished = []
        self._drop_cancelled()
        while self.running:
            finished += self._decode()
            self._drop_cancelled()
        self._inbox.calls.run(self._engine)
        return finished

    def withdraw(self, keys: Set[Hashable]) -> None:
        """Abort these requests, running or queued. All others go on."""
        self.running -= len(keys)
        if admitted := keys - {request.key for request in self._queue}:
            self._engine.abort(admitted)
        self._queue = deque(request for request in self._queue if request.key not in keys)

    def _admit_queued(self) -> None:
        """Admit queued requests once their wait has cost as much as an admission, or after MAX_STEPS_QUEUED steps.

        Admitting requests one by one, as slots become free or tools return, would keep the engine from decoding at full
        speed (docs/results/entry_of_requests_1xh200.json). Waiting until free slots have lost as many steps as an
        admission costs (the ski-rental rule) costs at most twice the best schedule.
        """
        in_engine = self.running - len(self._queue)
        if not (admissible := min(len(self._queue), self.max_num_seqs - in_engine)):
            return
        self._steps_queued += 1
        self._slot_steps_lost += admissible
        if self._slot_steps_lost >= self._engine.admission_cost * in_engine or self._steps_queued > MAX_STEPS_QUEUED:
            self._steps_queued = self._slot_steps_lost = 0
            for _ in range(admissible):
                self._admit(self._queue.popleft())

    def _admit(self, request: Request) -> None:
        try:
            self._engine.submit([request])
        except ValueError as error:  # too long for the engine, or unsupported sampling settings
            self.running -= 1
            self._listeners.pop(request.key, None)
            if (future := self._futures.pop(request.key, None)) is None:
                raise
            settle(future, error)

    def _decode(self) -> Finished:
        self._admit_queued()
        self._decoded[self.running - len(self._queue)] += 1
        finished = self._engine.step()
        self.running -= len(finished)
        for key, delta in self._engine.deltas() if self._listeners else ():
            if key in self._listeners:
                self._listeners[key](delta)
        own: Finished = []
        for key, completion in finished:
            if (future := self._futures.pop(key, None)) is None:
                own.append((key, completion))
            else:
                self._listeners.pop(key, None)
                settle(future, completion)
        return own

    def read_tail(self) -> float:
        """Return the fraction of engine steps, since the last call, with less than a quarter of the most requests."""
        decoded, self._decoded = self._decoded, Counter()
        most = max(decoded, default=0)
        return sum(steps for running, steps in decoded.items() if 4 * running < most) / max(1, decoded.total())

    def abort(self) -> None:
        """Abort all requests and calls. Their futures are cancelled."""
        self._engine.abort()
        self._queue.clear()
        self.running = 0
        pending = [*self._futures.values(), *(future for _, future, _ in self._inbox.take())]
        self._futures.clear()
        self._listeners.clear()
        self._inbox.calls.cancel()
        for future in pending:
            future.cancel()

    def _drop_cancelled(self) -> None:
        """Abort cancelled requests. Runs before new requests are accepted, because they may use a cancelled key."""
        for key, future in self._inbox.take_cancelled():
            if self._futures.get(key) is future:
                del self._futures[key]
                self._listeners.pop(key, None)
                self.withdraw({key})

    def _accept(self, request: Request, future: Future[Completion], on_delta: OnDelta | None) -> None:
        if future.cancelled():
            return
        if request.key in self._futures:
            settle(future, ValueError(f"request key {request.key!r} is already running"))
            return
        self.submit([request])
        self._futures[request.key] = future
        if on_delta is not None:
            self._listeners[request.key] = on_delta
