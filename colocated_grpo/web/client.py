"""A small JSON client over the standard library, for servers that come, go and answer nonsense."""

from __future__ import annotations

import json
import time
import zlib
from http.client import HTTPException, HTTPResponse, IncompleteRead
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from colocated_grpo.web.packing import TooLarge, unpack

HEADERS = {"Accept-Encoding": "gzip", "Content-Type": "application/json"}
LARGEST_ANSWER = 1 << 30
"""Bytes, unpacked: a batch of some tens of millions of tokens."""
PIECE = 1 << 20

# The servers meant here are on this machine or in its cluster, where a proxy for the internet only gets in the way.
_opener = build_opener(ProxyHandler({}))


class Unavailable(Exception):
    """No usable answer: not reached, too late, a server error, or no JSON. Worth another try."""


class Refused(Exception):
    """The server understood the request and refuses it: 4xx. Trying again would change nothing."""


class JsonClient:
    def __init__(self, url: str, *, timeout: float) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout

    def get(self, path: str) -> Any:
        return self._call(Request(self._url + path, headers=HEADERS))

    def post(self, path: str, body: Any) -> Any:
        return self._call(Request(self._url + path, json.dumps(body).encode(), HEADERS))

    def _call(self, request: Request) -> Any:
        """The parsed answer; plain text comes back as a string."""
        try:
            with _opener.open(request, timeout=self._timeout) as answer:
                raw, headers = self._read(answer), answer.headers
            body = unpack(raw, LARGEST_ANSWER) if headers.get("Content-Encoding") == "gzip" else raw
            return json.loads(body) if "json" in headers.get("Content-Type", "") else body.decode(errors="replace")
        except HTTPError as error:
            kind = Refused if 400 <= error.code < 500 else Unavailable
            raise kind(f"{error.code} {error.reason}") from None
        except TooLarge:
            raise Unavailable(f"the answer is larger than {LARGEST_ANSWER} bytes") from None
        except (OSError, HTTPException, zlib.error, ValueError, RecursionError) as error:
            raise Unavailable(_reason(error)) from None

    def _read(self, answer: HTTPResponse) -> bytes:
        """In pieces: for as many bytes as a header promises Python would make room at once, and the timeout of a
        connection begins anew with each byte."""
        deadline, body = time.monotonic() + self._timeout, bytearray()
        while piece := answer.read1(PIECE):
            body += piece
            if len(body) > LARGEST_ANSWER:
                raise TooLarge
            if time.monotonic() > deadline:
                raise TimeoutError(f"the answer takes longer than {self._timeout:g} s")
        if answer.length:
            raise IncompleteRead(b"", answer.length)
        return bytes(body)


def _reason(error: BaseException) -> str:
    """What happened, in a few words: urllib wraps the interesting exception."""
    inner = getattr(error, "reason", error)
    return str(inner) or type(inner).__name__
