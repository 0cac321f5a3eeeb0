"""Requests from rank 0, which serves HTTP, to the engines of all ranks. A rank link is a connection to another rank.

Python's `multiprocessing.connection` frames and pickles its messages, and authenticates both ends with a secret that
was broadcast over the process group. Unlike the connections of `servers/remote.py`, a link is never restored.
"""

import asyncio
import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, TypeVar, cast

from colocated_grpo.rollout.engine import Request, TokenDelta
from colocated_grpo.rollout.inbox import Driver, Inbox, OnDelta, settle
from colocated_grpo.runtime import distributed, rendezvous
from colocated_grpo.servers.text import InvalidRequest
from colocated_grpo.types import Completion

T = TypeVar("T")
Outcome = TokenDelta | Completion | str | None
"""Response to a request. TokenDelta: new tokens. At the end, the completion; or str, the error line if the engine
rejects the request; or None if the engine has stopped."""


class ServerClosing(Exception):
    """The engines have stopped, so the request cannot be completed."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class LoadBalancer:
    """Send each request to the engine with the fewest requests in flight. Not thread-safe: for one event loop."""

    def __init__(self, inbox: Inbox, links: "Sequence[Inbox | RankLink]" = ()) -> None:
        """inbox: inbox of this rank's engine. links: links to the other ranks' engines."""
        self._inbox = inbox
        self._engines = [inbox, *links]
        self.in_flight = [0] * len(self._engines)
        self.closed = False
        """True once the engines have stopped permanently; every later request raises ServerClosing."""

    async def send(
        self,
        request: Request,
        on_delta: OnDelta | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> Completion:
        """Return the completion. Cancellation aborts the request in its engine. Raises InvalidRequest or ServerClosing.

        on_completion: called on the thread of this rank's engine, which then has the request, before it may sleep.
        """
        if self.closed:
            raise ServerClosing
        chosen = min(range(len(self._engines)), key=self.in_flight.__getitem__) if on_completion is None else 0
        self.in_flight[chosen] += 1
        try:
            future = self._engines[chosen].put(request, on_delta)
            if on_completion is not None:
                future.add_done_callback(lambda f: f.cancelled() or f.exception() or on_completion(f.result()))
            return await result_of(future)
        finally:
            self.in_flight[chosen] -= 1

    def top_logprobs(self, token_ids: list[int], k: int) -> Future[list[dict[int, float]]]:
        """Return the future of `RolloutEngine.top_logprobs` on this rank's engine."""
        return self._inbox.calls.submit(lambda engine: engine.top_logprobs(token_ids, k))


async def result_of(future: Future[T]) -> T:
    """Await an engine's future, which cancelling the task cancels. A ValueError of the engine becomes InvalidRequest.

    A future cancelled by the engine raises ServerClosing: engines cancel futures only when they stop.
    """
    try:
        return await asyncio.wrap_future(future)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None, "coroutines run in a task"
        if task.cancelling():
            raise
        raise ServerClosing from None


class PeerRequests:
    """Requests of one peer in this process's inbox, by the peer's request numbers."""

    def __init__(self, inbox: Inbox, send: Callable[[int, Outcome], None]) -> None:
        """send: sends an outcome to the peer. Called on the thread that drives the engine."""
        self._inbox = inbox
        self._send = send
        self._futures: dict[int, Future[Completion]] = {}

    def put(self, requests: Mapping[int, Request]) -> None:
        """Queue the requests together, so that the engine admits them in the same step."""
        entries = [(one, partial(self._send, number) if one.stream else None) for number, one in requests.items()]
        for number, future in zip(requests, self._inbox.put_all(entries), strict=True):
            self._futures[number] = future
            future.add_done_callback(partial(self._finish, number))

    def cancel(self, numbers: Iterable[int] | None = None) -> None:
        """Abort the requests with these numbers; None: all requests. No outcome is sent for aborted requests."""
        for number in list(self._futures) if numbers is None else numbers:
            if (future := self._futures.pop(number, None)) is not None:
                future.cancel()

    def _finish(self, number: int, done: Future[Completion]) -> None:
        if self._futures.pop(number, None) is None:
            return  # cancelled by the peer
        if done.cancelled():
            self._send(number, None)
        else:
            self._send(number, done.result() if done.exception() is None else str(done.exception()))


class _Messages:
    """Tuples over a connection. Sending is thread-safe."""

    def __init__(self, connection: Connection) -> None:
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, *message: object) -> None:
        """Send a message. Raises OSError if the other rank has ended."""
        with self._lock:
            self._connection.send(message)

    def receive(self) -> tuple[Any, ...] | None:
        """Return the next message; None when the connection is closed."""
        try:
            return self._connection.recv()
        except (OSError, EOFError, TypeError):  # TypeError: closed by this side during the read
            return None

    def close(self) -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)  # wakes the receiving thread
        self._connection.close()


class RankLink:
    """Rank 0's end of a link. `put` behaves like `Inbox.put` on the other rank."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._messages = _Messages(Client(address, _family(address[0]), secret))
        self._pending: dict[int, tuple[Future[Completion], OnDelta | None]] = {}
        """By number. Changed by several threads, in atomic operations only."""
        self._numbers = itertools.count(1)
        threading.Thread(target=self._receive, name="rank link", daemon=True).start()

    def put(self, request: Request, on_delta: OnDelta | None = None) -> Future[Completion]:
        """Submit a request. `on_delta` is called on the receiving thread."""
        future: Future[Completion] = Future()
        number = next(self._numbers)
        self._pending[number] = future, on_delta
        future.add_done_callback(partial(self._cancel, number))
        try:
            self._messages.send("put", number, request)
        except OSError:  # the other rank has ended
            future.cancel()
        return future

    def _cancel(self, number: int, done: Future[Completion]) -> None:
        if done.cancelled() and self._pending.pop(number, None) is not None:
            with suppress(OSError):  # the other rank has ended
                self._messages.send("cancel", number)

    def end_phase(self, phase: int, *, abort: bool) -> None:
        """End a phase on the other rank, and finish or abort the phase's running requests. Phases count from 1."""
        self._messages.send("end", phase, abort)

    def _receive(self) -> None:
        while (message := self._messages.receive()) is not None:
            number, outcome = message
            is_delta = isinstance(outcome, TokenDelta)
            pending = self._pending.get(number) if is_delta else self._pending.pop(number, None)
            if pending is None:
                continue  # cancelled while the outcome was in transit
            future, on_delta = pending
            if is_delta:
                if on_delta is not None:
                    on_delta(outcome)
            elif outcome is None:
                future.cancel()
            else:
                settle(future, ValueError(outcome) if isinstance(outcome, str) else outcome)

    def close(self) -> None:
        self._messages.close()


class RemoteInbox:
    """The other rank's end of a link: puts rank 0's requests into this rank's inbox."""

    def __init__(self, inbox: Inbox, host: str, secret: bytes) -> None:
        self._inbox = inbox
        self._secret = secret
        self._listener = Listener((host, 0), _family(host))
        self.address = cast(tuple[str, int], self._listener.address[:2])
        self._closed = False
        self._messages: _Messages | None = None
        self._requests = PeerRequests(inbox, self._send)
        self.last_ended = 0
        """The last phase that rank 0 has ended."""
        self._aborted = False
        threading.Thread(target=self._accept, name="rank link", daemon=True).start()

    def serve(self, driver: Driver, phase: int) -> None:
        """Serve rank 0's requests until rank 0 ends the phase. driver: must use the inbox of this object."""
        while self.last_ended < phase:
            driver.step()
        if self._aborted:
            driver.abort()
        else:
            driver.drain()

    def _accept(self) -> None:
        """Receive from each connection on a separate thread, so that one without the secret cannot block rank 0."""
        while not self._closed:
            with suppress(OSError):  # the listener is closed
                connection = self._listener.accept()
                threading.Thread(target=self._receive, args=(connection,), name="rank link", daemon=True).start()

    def _receive(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
        except (AuthenticationError, OSError, EOFError):
            connection.close()
            return
        self._messages = messages = _Messages(connection)
        while (message := messages.receive()) is not None:
            match message:
                case "put", number, request:
                    self._requests.put({number: replace(request, key=("link", number))})
                case "cancel", number:
                    self._requests.cancel([number])
                case "end", phase, abort:
                    # `_aborted` first: the driving thread reads `_aborted` after it has seen the phase end.
                    self._aborted, self.last_ended = abort, phase
                    self._inbox.wake()

    def _send(self, number: int, outcome: Outcome) -> None:
        assert self._messages is not None, "requests arrive over the connection"
        with suppress(OSError):  # rank 0 has exited; the watchdog ends this process too
            self._messages.send(number, outcome)

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        if self._messages is not None:
            self._messages.close()


def _family(host: str) -> str:
    return "AF_INET6" if ":" in host else "AF_INET"


def link_ranks(inbox: Inbox, world: distributed.World) -> tuple[list[RankLink], RemoteInbox | None]:
    """Connect rank 0 to every other rank. Collective. Returns rank 0's links, and another rank's remote inbox."""
    secret = world.broadcast_object(secrets.token_bytes(32) if world.is_main else None)
    remote = None if world.is_main else RemoteInbox(inbox, rendezvous.own_address(os.environ["MASTER_ADDR"]), secret)
    addresses = world.gather_objects(None if remote is None else remote.address)
    links = [RankLink(address, secret) for address in addresses if address is not None] if world.is_main else []
    return links, remote
