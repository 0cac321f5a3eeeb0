"""Request bodies of a known size: read whole, unpacked, and refused before they fill the memory."""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colocated_grpo.web.packing import TooLarge, unpack

BODY_SECONDS = 60.0
"""From head to end of a body. A half-sent one holds one of the places for requests, which would else be for ever."""
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""A half of a pair, as JSON writes it."""


class BodyRefused(Exception):
    """A body that the application shall not see: the status and the sentence to answer with."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class RequestBodies:
    """Middleware: hands each request on with its whole body, gzip undone; 413 above `max_bytes`, 400 for broken gzip,
    408 where it takes too long.

    The limit holds for the unpacked size: a kilobyte of gzip can stand for a megabyte. Bodies are text in UTF-8, for
    strings that cannot be written in it break whatever they reach: tokenizers, replies, the engine.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, refuse: Callable[[int, str], Response]) -> None:
        """refuse: the answer with this status and this sentence."""
        self._app = app
        self._max_bytes = max_bytes
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(Headers(scope=scope), receive)
        except TimeoutError:
            await self._refuse(408, f"the request body did not come within {BODY_SECONDS:g} s")(scope, receive, send)
            return
        except BodyRefused as refusal:
            await self._refuse(refusal.status, str(refusal))(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        del headers["content-encoding"]
        headers["content-length"] = str(len(body))
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        if int(headers.get("content-length", "0")) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_bytes:
                raise self._too_large()
        packed = "gzip" in headers.get("content-encoding", "").lower()
        whole = self._unpack(bytes(body)) if packed and body else bytes(body)
        _check_text(whole)
        return whole

    def _unpack(self, packed: bytes) -> bytes:
        try:
            return unpack(packed, self._max_bytes)
        except zlib.error:
            raise BodyRefused(400, "Invalid gzip payload") from None
        except TooLarge:
            raise self._too_large() from None

    def _too_large(self) -> BodyRefused:
        return BodyRefused(413, f"request body above the limit of {self._max_bytes} bytes")


def _check_text(body: bytes) -> None:
    try:
        body.decode()
        # A zero byte would make Python's parser take the body for UTF-16.
        clean = b"\0" not in body and not (SURROGATE.search(body) and _has_lone_surrogate(body))
    except UnicodeDecodeError:
        clean = False
    if not clean:
        raise BodyRefused(400, "request bodies are text in UTF-8")


def _has_lone_surrogate(body: bytes) -> bool:
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return True
    except ValueError:
        pass  # no JSON: the application says so
    return False


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then what the connection says, so that a disconnect is still heard."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
