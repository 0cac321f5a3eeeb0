"""The JSON client against malformed responses: it returns JSON or raises Unavailable or RequestRejected."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from contextlib import suppress

import pytest

from colocated_grpo.web.client import JsonClient, RequestRejected, Unavailable
from tests.support.raw_server import raw_server, response

COMPRESSED = gzip.compress(b'{"a": 1}' * 50)
GZIP = "Content-Encoding: gzip"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"220 a mail server\r\n",
        response(b"{"),
        response(b"[" * 100_000),
        response(b"no gzip", GZIP),
        response(COMPRESSED[:-9], GZIP),
        response(COMPRESSED[:12] + b"\xff\xff\xff" + COMPRESSED[15:], GZIP),
        response(b"{}", status="503 Busy"),
        response(b"{}").replace(b"Content-Length: 2", b"Content-Length: 20"),
        response(b"{}").replace(b"Content-Length: 2", b"Content-Length: 9000000000000000"),
        response(b"{}").replace(b"Content-Length: 2", b"Content-Length: " + b"9" * 40),
    ],
)
def test_a_malformed_response_is_unavailable(raw):
    with raw_server(raw) as url, pytest.raises(Unavailable):
        JsonClient(url, timeout=5).get("/status")


@pytest.mark.parametrize("headers", [(), (GZIP,)])
def test_a_response_above_the_limit_is_unavailable(monkeypatch, headers):
    monkeypatch.setattr("colocated_grpo.web.client.MAX_RESPONSE_BYTES", 1000)
    body = json.dumps("a" * 2000).encode()
    raw = response(gzip.compress(body) if headers else body, *headers)
    with raw_server(raw) as url, pytest.raises(Unavailable, match="larger than 1000 bytes"):
        JsonClient(url, timeout=5).get("/batch")


def test_a_response_that_never_ends_is_unavailable_after_the_timeout():
    def send_forever(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=send_forever, args=(listener,), daemon=True).start()
        client = JsonClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=1)
        with pytest.raises(Unavailable, match=r"takes longer than 1 s"):
            client.get("/batch")


def test_a_4xx_status_is_a_rejection():
    not_found = response(b"{}", status="404 Not Found")
    with raw_server(not_found) as url, pytest.raises(RequestRejected, match="404 Not Found"):
        JsonClient(url, timeout=5).post("/step", {})


@pytest.mark.parametrize("raw", [b"HTTP/1.1 503 \x1b[2Jdown\r\n\r\n", b"\x1b[2Jdown\r\n\r\n"])
def test_no_control_characters_of_a_server_reach_a_message(raw):
    with raw_server(raw) as url, pytest.raises(Unavailable) as caught:
        JsonClient(url, timeout=5).post("/score", {})
    assert "\\x1b[2Jdown" in str(caught.value) and str(caught.value).isprintable()


def test_a_redirect_to_another_origin_is_followed_without_the_key():
    sent: list[bytes] = []
    with raw_server(response(b"{}"), sent=sent) as other:
        moved = response(b"", f"Location: {other}/status", status="302 Found")
        with raw_server(moved) as url:
            JsonClient(url, timeout=5, api_key="my-key").get("/status")
        there = response(b"", "Location: /v2", status="302 Found")
        with raw_server(there, response(b"{}"), sent=sent) as url:
            JsonClient(url, timeout=5, api_key="my-key").get("/status")
    assert [b"my-key" in head for head in sent] == [False, True, True]


def test_a_gzip_response_is_decompressed_and_parsed():
    with raw_server(response(gzip.compress(b'{"a": 1}'), GZIP)) as url:
        assert JsonClient(url, timeout=5).get("/status") == {"a": 1}
