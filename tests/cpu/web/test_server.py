"""The server's connections: how many are accepted, and how long one may stay idle."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from colocated_grpo.runtime import program
from colocated_grpo.web import server as server_module
from colocated_grpo.web.server import Connection, ServerThread
from tests.support.servers import until

SECONDS = 120
GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nHost: here\r\n"
OK = b"HTTP/1.1 200 OK\r\n"


class GatedServer:
    """A server that responds to requests while `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.thread = ServerThread(self, "127.0.0.1", [0])

    async def __call__(self, scope, receive, send) -> None:
        await asyncio.to_thread(self.open.wait, SECONDS)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    @contextmanager
    def not_reading(self) -> Generator[None]:
        """Neither accept connections nor read from them in this context."""
        until(lambda: self.thread._server.started)
        go_on = threading.Event()
        self.thread._server.servers[0].get_loop().call_soon_threadsafe(go_on.wait)
        yield
        go_on.set()

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.thread.ports[0]), timeout=SECONDS)
        connection.settimeout(SECONDS)
        return connection


@pytest.fixture
def server() -> Iterator[GatedServer]:
    server = GatedServer()
    yield server
    server.thread.close()


def read_until_closed(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, GET + HEAD])
def test_a_connection_without_a_complete_request_is_closed(monkeypatch, server, sent):
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.3)
    with server.not_reading():  # the time begins when all is sent
        connection = server.connect()
        connection.sendall(sent)
    with connection:
        assert read_until_closed(connection).count(OK) == sent.count(GET)


def test_a_connection_with_a_pending_response_is_never_closed(monkeypatch, server):
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.3)
    checks = []
    check = Connection._check_idle
    monkeypatch.setattr(Connection, "_check_idle", lambda self, last: (checks.append(last), check(self, last)))
    server.open.clear()
    with server.connect() as connection:
        connection.sendall(GET)
        until(lambda: len(checks) > 2)
        server.open.set()
        assert read_until_closed(connection).startswith(OK)


class LongServer(GatedServer):
    """A server that sends chunks until its client is gone."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        super().__init__()

    async def __call__(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await self._next(receive, send)) != "http.disconnect":
            pass
        self.ended.set()

    async def _next(self, receive, send) -> str:
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.body", "body": b"a" * (1 << 20), "more_body": True})
        done, _ = await asyncio.wait([gone], timeout=0)
        gone.cancel()
        return gone.result()["type"] if done else ""


def test_a_response_that_its_client_does_not_read_ends(monkeypatch):
    checks: queue.SimpleQueue[tuple[Connection, object]] = queue.SimpleQueue()
    monkeypatch.setattr(Connection, "_check_later", lambda self, last: checks.put((self, last)))
    server = LongServer()
    with server.connect() as reader, server.connect() as idle:
        for connection in (reader, idle):
            connection.sendall(GET)
        while not server.ended.is_set():
            for _ in range(16):
                assert reader.recv(1 << 20)
            for connection, last in [checks.get() for _ in range(checks.qsize())]:
                connection.loop.call_soon_threadsafe(connection._check_idle, last)
        assert read_until_closed(idle).startswith(OK)
    server.thread.close()


def test_connections_above_the_limit_are_closed_and_the_others_are_served(monkeypatch, server):
    monkeypatch.setattr(server_module, "max_client_connections", lambda: 2)
    with server.connect() as one, server.connect() as other:
        for connection in (one, other):
            connection.sendall(GET)
            assert connection.recv(1 << 16).startswith(OK)
        with server.connect() as third:
            assert read_until_closed(third) == b""
        one.sendall(GET)
        assert one.recv(1 << 16).startswith(OK)


def test_an_endless_request_head_is_rejected(server):
    with server.connect() as connection:
        connection.sendall(HEAD)
        with pytest.raises(OSError):
            for _ in range(10_000):
                connection.sendall(b"a: " + b"b" * 8000 + b"\r\n")


@pytest.mark.parametrize(("soft", "most"), [(1024, 768), (-1, program.DESCRIPTORS * 3 // 4)])
def test_a_quarter_of_the_descriptors_is_reserved_for_the_run(monkeypatch, soft, most):
    monkeypatch.setattr(program.resource, "getrlimit", lambda which: (soft, -1))
    assert server_module.max_client_connections() == most


def test_the_repr_of_the_guard_does_not_show_the_key():
    async def app(*_arguments: object) -> None: ...

    assert "hush" not in repr(server_module.RequireApiKey(app, "hush", ()))
