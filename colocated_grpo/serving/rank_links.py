"""Requests from rank 0, where clients connect, to the engines of the other ranks, and their completions back.

One TCP connection a rank, one line of JSON a message. Ranks prove with a secret that they belong to the same run.
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
from dataclasses import asdict
from typing import Any

from colocated_grpo.rollout.engine import Request, Sampling, TokenDelta
from colocated_grpo.rollout.inbox import Inbox, OnDelta
from colocated_grpo.runtime.distributed import World
from colocated_grpo.types import Completion

CONNECT_SECONDS = 60.0
LONGEST_SECRET = 256


class _Line:
    """JSON lines over a socket; sending is thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._connection.sendall(data)

    def receive(self) -> dict[str, Any] | None:
        """None once the other side has gone."""
        try:
            line = self._reader.readline()
        except (OSError, ValueError):  # closed on this side while it was read
            return None
        return json.loads(line) if line else None

    def first(self, limit: int) -> bytes:
        """The first line, of which no more than `limit` bytes are read."""
        try:
            return self._reader.readline(limit).rstrip(b"\n")
        except OSError:
            return b""

    def close(self) -> None:
        with suppress(OSError):  # the other side was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Link:
    """Rank 0's end: looks like the inbox of the rank at the other end."""

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        connection = socket.create_connection(address, timeout=CONNECT_SECONDS)
        connection.settimeout(None)
        connection.sendall(secret.encode() + b"\n")
        self._line = _Line(connection)
        self._futures: dict[int, Future[Completion]] = {}
        self._listeners: dict[int, OnDelta] = {}
        self._sent = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._receive, name="link", daemon=True).start()

    def put(self, request: Request, listen: OnDelta | None = None) -> Future[Completion]:
        """As `Inbox.put`; pieces are told on the thread that receives them."""
        future: Future[Completion] = Future()
        with self._lock:
            self._sent += 1
            number = self._sent
            self._futures[number] = future
            if listen is not None:
                self._listeners[number] = listen
        message = {
            "token_ids": request.token_ids,
            "seed": request.seed,
            "sampling": asdict(request.sampling),
            "stream": request.stream,
        }
        future.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        self._line.send({"id": number, **message})
        return future

    def _cancel(self, number: int) -> None:
        with self._lock:
            known = self._futures.pop(number, None)
            self._listeners.pop(number, None)
        if known is not None:
            self._line.send({"cancel": number})

    def end_phase(self, phase: int, *, abort: bool) -> None:
        """The rank finishes what is under way, or gives it up, and stops serving phase `phase`."""
        self._line.send({"end": phase, "abort": abort})

    def _receive(self) -> None:
        while (message := self._line.receive()) is not None:
            if "piece" in message:
                self._tell(message["id"], TokenDelta(*message["piece"]))
                continue
            with self._lock:
                future = self._futures.pop(message["id"], None)
                self._listeners.pop(message["id"], None)
            if future is None:
                continue
            if "completion" not in message and "error" not in message:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                _resolve(future, message)

    def _tell(self, number: int, piece: TokenDelta) -> None:
        with self._lock:
            listen = self._listeners.get(number)
        if listen is not None:
            listen(piece)

    def close(self) -> None:
        self._line.close()


def _resolve(future: Future[Completion], message: dict[str, Any]) -> None:
    if "error" in message:
        future.set_exception(ValueError(message["error"]))
    else:
        future.set_result(Completion(**message["completion"]))


class LinkedInbox:
    """Another rank's end: puts what rank 0 sends into its inbox."""

    def __init__(self, inbox: Inbox, host: str, secret: str) -> None:
        self._inbox = inbox
        self._secret = secret
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._line: _Line | None = None
        self._futures: dict[int, Future[Completion]] = {}
        self._ended = 0
        self.aborted = False
        threading.Thread(target=self._serve, name="link", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.getsockname()[:2]

    def ended(self, phase: int) -> bool:
        """Whether rank 0 has ended this phase; `aborted` says how."""
        return self._ended >= phase

    def _serve(self) -> None:
        while self._line is None:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._line = self._admit(connection)
        while (message := self._line.receive()) is not None:
            self._handle(message)

    def _admit(self, connection: socket.socket) -> _Line | None:
        """The line of a peer that knows the secret: anybody on the machine may connect to a port."""
        connection.settimeout(CONNECT_SECONDS)
        line = _Line(connection)
        if not hmac.compare_digest(line.first(LONGEST_SECRET), self._secret.encode()):
            line.close()
            return None
        connection.settimeout(None)
        return line

    def _handle(self, message: dict[str, Any]) -> None:
        if "end" in message:
            self.aborted = message["abort"]
            self._ended = message["end"]
            self._inbox.wake()
        elif "cancel" in message:
            future = self._futures.pop(message["cancel"], None)
            if future is not None:
                future.cancel()
        else:
            self._put(message)

    def _put(self, message: dict[str, Any]) -> None:
        number = message["id"]
        settings = message["sampling"]
        sampling = Sampling(**{key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()})
        request = Request(
            key=("link", number),
            token_ids=message["token_ids"],
            seed=message["seed"],
            sampling=sampling,
            stream=message["stream"],
        )
        future = self._inbox.put(request, (lambda piece: self._send_piece(number, piece)) if request.stream else None)
        self._futures[number] = future
        future.add_done_callback(lambda done: self._answer(number, done))

    def _answer(self, number: int, done: Future[Completion]) -> None:
        if self._futures.pop(number, None) is None:
            return  # cancelled by rank 0, which no longer waits
        answer: dict[str, Any] = {"id": number}
        if not done.cancelled():
            error = done.exception()
            answer |= {"completion": asdict(done.result())} if error is None else {"error": str(error)}
        self._send(answer)

    def _send_piece(self, number: int, piece: TokenDelta) -> None:
        self._send({"id": number, "piece": piece})

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # rank 0 has gone; the watchdog ends this process too
            self._line.send(message)

    def close(self) -> None:
        self._listener.close()
        if self._line is not None:
            self._line.close()


def own_address(peer: str) -> str:
    """This machine's address on the way to `peer`. Its own name may resolve to 127.0.1.1, as on many machines."""
    family, kind, protocol, _, address = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only looks up the route
        return probe.getsockname()[0]


def link_ranks(inbox: Inbox, world: World) -> tuple[list[Link], LinkedInbox | None]:
    """Links to every other rank on rank 0, the other end elsewhere. Collective."""
    secret = world.broadcast_object(secrets.token_hex(32) if world.is_main else None)
    end = None if world.is_main else LinkedInbox(inbox, own_address(os.environ["MASTER_ADDR"]), secret)
    addresses = world.gather_objects(None if end is None else end.address)
    links = [Link(address, secret) for address in addresses if address is not None] if world.is_main else []
    return links, end
