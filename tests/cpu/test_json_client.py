"""The JSON client against servers that answer nonsense: whatever comes, it is Refused, Unavailable or an answer."""

from __future__ import annotations

import gzip

import pytest

from colocated_grpo.web.client import JsonClient, Refused, Unavailable

from raw_server import answering, response

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
    ],
)
def test_nonsense_is_no_answer_and_worth_another_try(raw):
    with answering(raw) as url, pytest.raises(Unavailable):
        JsonClient(url, timeout=5).get("/status")


def test_a_refusal_is_told_from_a_failure():
    with answering(response(b"{}", status="404 Not Found")) as url, pytest.raises(Refused, match="404 Not Found"):
        JsonClient(url, timeout=5).post("/step", {})


def test_an_answer_is_unpacked_and_parsed():
    with answering(response(gzip.compress(b'{"a": 1}'), GZIP)) as url:
        assert JsonClient(url, timeout=5).get("/status") == {"a": 1}
