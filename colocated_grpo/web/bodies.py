"""Middleware that reads, decompresses and validates request bodies within limits of size and time."""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colocated_grpo.web.gunzip import TooLarge, gunzip

BODY_SECONDS = 60.0
"""Time limit from the end of the headers to the end of the body. An unfinished body counts as a concurrent request."""
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""The JSON escape of a UTF-16 surrogate, paired or not."""


class BodyRejected(Exception):
    """An invalid request body, with the status and message of the error response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BodyLimit:
    """Pass on each request with its complete, decompressed body, or respond with an error.

    413 above `max_bytes` after decompression, 408 after BODY_SECONDS, 400 for corrupt gzip and for text that is not
    UTF-8. Strings that UTF-8 cannot encode would raise later, in tokenizers, responses or the engine.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, error_response: Callable[[int, str], Response]) -> None:
        """error_response: makes a response from a status and a message."""
        self._app = app
        self._max_bytes = max_bytes
        self._error_response = error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(Headers(scope=scope), receive)
        except TimeoutError:
            message = f"the request body did not arrive within {BODY_SECONDS:g} s"
            await self._error_response(408, message)(scope, receive, send)
            return
        except BodyRejected as error:
            await self._error_response(error.status, str(error))(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        del headers["content-encoding"]
        headers["content-length"] = str(len(body))
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        if int(headers.get("content-length", "0")) > self._max_bytes:
            raise self._too_large()
        received = bytearray()
        more = True
        while more:
            message = await receive()
            received += message.get("body", b"")
            more = message.get("more_body", False)
            if len(received) > self._max_bytes:
                raise self._too_large()
        body = bytes(received)
        if body and "gzip" in headers.get("content-encoding", "").lower():
            body = self._decompress(body)
        _check_text(body)
        return body

    def _decompress(self, compressed: bytes) -> bytes:
        try:
            return gunzip(compressed, self._max_bytes)
        except zlib.error:
            raise BodyRejected(400, "Invalid gzip payload") from None
        except TooLarge:
            raise self._too_large() from None

    def _too_large(self) -> BodyRejected:
        return BodyRejected(413, f"the request body exceeds the limit of {self._max_bytes} bytes")


def _check_text(body: bytes) -> None:
    try:
        body.decode()
        # json.loads decodes bytes with a zero byte near the start as UTF-16 or UTF-32.
        valid = b"\0" not in body and not (SURROGATE.search(body) and _has_lone_surrogate(body))
    except UnicodeDecodeError:
        valid = False
    if not valid:
        raise BodyRejected(400, "the request body must be text in UTF-8")


def _has_lone_surrogate(body: bytes) -> bool:
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return True
    except ValueError:
        pass  # invalid JSON: the application's own parser reports it
    return False


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body once and then the connection's messages, such as a disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
