"""The JSON client against servers that answer nonsense: whatever comes, it is Refused, Unavailable or an answer."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from contextlib import suppress

import pytest

from colocated_grpo.web.client import JsonClient, Refused, Unavailable
from tests.support.raw_server import answering, response

PACKED = gzip.compress(b'{"a": 1}' * 50)
GZIP = "Content-Encoding: gzip"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"220 a mail server\r\n",
        response(b"{"),
        response(b"[" * 100_000),
        response(b"no gzip", GZIP),
        response(PACKED[:-9], GZIP),
        response(PACKED[:12] + b"\xff\xff\xff" + PACKED[15:], GZIP),
        response(b"{}", status="503 Busy"),
        response(b"{}").replace(b"Content-Length: 2", b"Content-Length: 20"),
        response(b"{}").replace(b"Content-Length: 2", b"Content-Length: 9000000000000000"),
        response(b"{}").replace(b"Content-Length: 2", b"Content-Length: " + b"9" * 40),
    ],
)
def test_nonsense_is_no_answer_and_worth_another_try(raw):
    with answering(raw) as url, pytest.raises(Unavailable):
        JsonClient(url, timeout=5).get("/status")


@pytest.mark.parametrize("headers", [(), (GZIP,)])
def test_an_answer_that_is_too_large_is_not_taken_in(monkeypatch, headers):
    monkeypatch.setattr("colocated_grpo.web.client.LARGEST_ANSWER", 1000)
    body = json.dumps("a" * 2000).encode()
    raw = response(gzip.compress(body) if headers else body, *headers)
    with answering(raw) as url, pytest.raises(Unavailable, match="larger than 1000 bytes"):
        JsonClient(url, timeout=5).get("/batch")


def test_an_answer_without_end_is_not_waited_for():
    def talk(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=talk, args=(listener,), daemon=True).start()
        client = JsonClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=1)
        with pytest.raises(Unavailable, match=r"takes longer than 1 s"):
            client.get("/batch")


def test_a_refusal_is_told_from_a_failure():
    with answering(response(b"{}", status="404 Not Found")) as url, pytest.raises(Refused, match="404 Not Found"):
        JsonClient(url, timeout=5).post("/step", {})


def test_an_answer_is_unpacked_and_parsed():
    with answering(response(gzip.compress(b'{"a": 1}'), GZIP)) as url:
        assert JsonClient(url, timeout=5).get("/status") == {"a": 1}
