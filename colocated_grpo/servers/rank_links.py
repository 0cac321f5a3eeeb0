"""Rank links carry requests from rank 0, which serves HTTP, to the other ranks' engines, and completions back.

One TCP connection for each other rank, one JSON object per line. Rank 0 authenticates with a secret that was broadcast
over the process group.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress

from colocated_grpo.rollout.engine import Request, TokenDelta
from colocated_grpo.rollout.inbox import Driver, Inbox, OnDelta
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.stores import own_address
from colocated_grpo.servers.wire import completion_message, read_completion, read_request, request_message
from colocated_grpo.types import Completion, JsonObject

CONNECT_SECONDS = 60.0
MAX_SECRET_BYTES = 256


class _JsonLines:
    """JSON objects over a socket, one per line. Sending is thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: JsonObject) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._connection.sendall(data)

    def receive(self) -> JsonObject | None:
        """Return the next object; None when the connection is closed."""
        try:
            line = self._reader.readline()
        except (OSError, ValueError):  # closed by this side during the read
            return None
        return json.loads(line) if line else None

    def receive_raw(self, max_bytes: int) -> bytes:
        """Return the next line as bytes, cut off after `max_bytes`; empty when the connection is closed."""
        try:
            return self._reader.readline(max_bytes).rstrip(b"\n")
        except OSError:
            return b""

    def close(self) -> None:
        with suppress(OSError):  # the peer has already closed
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class RankLink:
    """Rank 0's end of a link. `put` behaves like `Inbox.put` on the other rank."""

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        connection = socket.create_connection(address, timeout=CONNECT_SECONDS)
        connection.settimeout(None)
        connection.sendall(secret.encode() + b"\n")
        self._lines = _JsonLines(connection)
        self._futures: dict[int, Future[Completion]] = {}
        self._on_delta: dict[int, OnDelta] = {}
        self._num_sent = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._receive, name="rank link", daemon=True).start()

    def put(self, request: Request, on_delta: OnDelta | None = None) -> Future[Completion]:
        """Submit a request. `on_delta` is called on the receiving thread."""
        future: Future[Completion] = Future()
        with self._lock:
            self._num_sent += 1
            number = self._num_sent
            self._futures[number] = future
            if on_delta is not None:
                self._on_delta[number] = on_delta
        message = {"id": number, **request_message(request)}
        future.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        try:
            self._lines.send(message)
        except OSError:  # the other rank has ended
            future.cancel()
        return future

    def _cancel(self, number: int) -> None:
        with self._lock:
            known = self._futures.pop(number, None)
            self._on_delta.pop(number, None)
        if known is not None:
            with suppress(OSError):  # the other rank has ended
                self._lines.send({"cancel": number})

    def end_phase(self, phase: int, *, abort: bool) -> None:
        """End a phase on the other rank, which finishes or aborts its running requests. Phases are counted from 1."""
        self._lines.send({"end": phase, "abort": abort})

    def _receive(self) -> None:
        while (message := self._lines.receive()) is not None:
            if "delta" in message:
                self._deliver(message["id"], TokenDelta(*message["delta"]))
                continue
            with self._lock:
                future = self._futures.pop(message["id"], None)
                self._on_delta.pop(message["id"], None)
            if future is None:
                continue  # cancelled here while the completion was on its way
            if "completion" not in message and "error" not in message:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                _resolve(future, message)

    def _deliver(self, number: int, delta: TokenDelta) -> None:
        with self._lock:
            on_delta = self._on_delta.get(number)
        if on_delta is not None:
            on_delta(delta)

    def close(self) -> None:
        self._lines.close()


def _resolve(future: Future[Completion], message: JsonObject) -> None:
    if "error" in message:
        future.set_exception(ValueError(message["error"]))
    else:
        future.set_result(read_completion(message["completion"]))


class RemoteInbox:
    """The other rank's end of a link: puts the requests of rank 0 into this rank's inbox."""

    def __init__(self, inbox: Inbox, host: str, secret: str) -> None:
        self._inbox = inbox
        self._secret = secret
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._lines: _JsonLines | None = None
        self._futures: dict[int, Future[Completion]] = {}
        self._last_ended = 0
        self._aborted = False
        threading.Thread(target=self._receive, name="rank link", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.getsockname()[:2]

    def ended(self, phase: int) -> bool:
        """Return True once rank 0 has ended this phase."""
        return self._last_ended >= phase

    def serve(self, driver: Driver, phase: int) -> None:
        """Serve the requests of rank 0 until it ends the phase. driver: takes its requests from the same inbox."""
        while not self.ended(phase):
            driver.step()
        if self._aborted:
            driver.abort()
        else:
            driver.drain()

    def _receive(self) -> None:
        while self._lines is None:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._lines = self._authenticate(connection)
        while (message := self._lines.receive()) is not None:
            self._handle(message)

    def _authenticate(self, connection: socket.socket) -> _JsonLines | None:
        """Return the connection if the peer sends the secret. Otherwise close it and return None."""
        connection.settimeout(CONNECT_SECONDS)
        lines = _JsonLines(connection)
        if not hmac.compare_digest(lines.receive_raw(MAX_SECRET_BYTES), self._secret.encode()):
            lines.close()
            return None
        connection.settimeout(None)
        return lines

    def _handle(self, message: JsonObject) -> None:
        if "end" in message:
            # In this order: the driving thread reads `_aborted` after it has seen the phase end.
            self._aborted = message["abort"]
            self._last_ended = message["end"]
            self._inbox.wake()
        elif "cancel" in message:
            future = self._futures.pop(message["cancel"], None)
            if future is not None:
                future.cancel()
        else:
            self._put(message)

    def _put(self, message: JsonObject) -> None:
        number = message["id"]
        request = read_request(("link", number), message)
        future = self._inbox.put(request, (lambda delta: self._send_delta(number, delta)) if request.stream else None)
        self._futures[number] = future
        future.add_done_callback(lambda done: self._send_result(number, done))

    def _send_result(self, number: int, done: Future[Completion]) -> None:
        """Send the completion or the error. A message with neither tells rank 0 that the engine aborted the request."""
        if self._futures.pop(number, None) is None:
            return  # cancelled by rank 0
        message: JsonObject = {"id": number}
        if not done.cancelled():
            error = done.exception()
            message |= {"completion": completion_message(done.result())} if error is None else {"error": str(error)}
        self._send(message)

    def _send_delta(self, number: int, delta: TokenDelta) -> None:
        self._send({"id": number, "delta": delta})

    def _send(self, message: JsonObject) -> None:
        assert self._lines is not None, "requests arrive over the connection"
        with suppress(OSError):  # rank 0 has exited; the watchdog ends this process too
            self._lines.send(message)

    def close(self) -> None:
        self._listener.close()
        if self._lines is not None:
            self._lines.close()


def link_ranks(inbox: Inbox, world: World) -> tuple[list[RankLink], RemoteInbox | None]:
    """Connect rank 0 to every other rank. Collective.

    Returns the links in rank order on rank 0 (and None), and an empty list and the remote inbox on every other rank.
    """
    secret = world.broadcast_object(secrets.token_hex(32) if world.is_main else None)
    remote = None if world.is_main else RemoteInbox(inbox, own_address(os.environ["MASTER_ADDR"]), secret)
    addresses = world.gather_objects(None if remote is None else remote.address)
    links = [RankLink(address, secret) for address in addresses if address is not None] if world.is_main else []
    return links, remote
