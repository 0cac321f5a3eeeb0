"""Connections of strangers: how many there may be, and how long one may say nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from colocated_grpo.runtime import descriptors
from colocated_grpo.web import serving
from colocated_grpo.web.server import ServerThread
from tests.support.servers import until

SECONDS = 4
GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nHost: here\r\n"
OK = b"HTTP/1.1 200 OK\r\n"


class Served:
    """A server that answers each request when `answer` is set."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.answer.set()
        self.server = ServerThread(self, "127.0.0.1", [0])

    async def __call__(self, scope, receive, send) -> None:
        await asyncio.to_thread(self.answer.wait, SECONDS)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.server.ports[0]), timeout=SECONDS)
        connection.settimeout(SECONDS)
        return connection


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.server.close()


def said(connection: socket.socket) -> bytes:
    """Until the server hangs up."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, GET + HEAD])
def test_a_connection_whose_request_does_not_come_is_closed(monkeypatch, served, sent):
    monkeypatch.setattr(serving, "SILENCE_SECONDS", 0.3)  # the client's thread may have to wait for a core
    with served.connect() as connection:
        connection.sendall(sent)
        assert said(connection).count(OK) == sent.count(GET)


def test_a_request_may_wait_for_its_answer_as_long_as_it_likes(monkeypatch, served):
    monkeypatch.setattr(serving, "SILENCE_SECONDS", 0.3)
    looks = []
    look = serving.Connection._look
    monkeypatch.setattr(serving.Connection, "_look", lambda self, last: (looks.append(last), look(self, last)))
    served.answer.clear()
    with served.connect() as connection:
        connection.sendall(GET)
        until(lambda: len(looks) > 2)
        served.answer.set()
        assert said(connection).startswith(OK)


def test_connections_beyond_the_most_are_closed_and_the_others_are_served(monkeypatch, served):
    monkeypatch.setattr(serving, "most_connections", lambda: 2)
    with served.connect() as one, served.connect() as other:
        for connection in (one, other):
            connection.sendall(GET)
            assert connection.recv(1 << 16).startswith(OK)
        with served.connect() as third:
            assert said(third) == b""
        one.sendall(GET)
        assert one.recv(1 << 16).startswith(OK)


def test_a_head_without_end_is_refused(served):
    with served.connect() as connection:
        connection.sendall(HEAD)
        with pytest.raises(OSError):
            for _ in range(10_000):
                connection.sendall(b"a: " + b"b" * 8000 + b"\r\n")


@pytest.mark.parametrize(("soft", "most"), [(1024, 768), (-1, descriptors.DESCRIPTORS * 3 // 4)])
def test_a_quarter_of_the_descriptors_is_not_for_clients(monkeypatch, soft, most):
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda which: (soft, -1))
    assert descriptors.most_connections() == most
