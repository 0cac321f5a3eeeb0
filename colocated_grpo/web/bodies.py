"""Request bodies of a known size: read whole, unpacked, and refused before they fill the memory."""

from __future__ import annotations

import zlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CHUNK_BYTES = 1 << 16


class BodyRefused(Exception):
    """A body that the application shall not see: the status and the sentence to answer with."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class RequestBodies:
    """Middleware: hands each request on with its whole body, gzip undone; 413 above `max_bytes`, 400 for broken gzip.

    The limit holds for the unpacked size: a kilobyte of gzip can stand for a megabyte.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(Headers(scope=scope), receive)
        except BodyRefused as refusal:
            await JSONResponse({"detail": str(refusal)}, refusal.status)(scope, receive, send)
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
        return self._unpack(bytes(body)) if packed and body else bytes(body)

    def _unpack(self, packed: bytes) -> bytes:
        unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            body = unpacker.decompress(packed, self._max_bytes + 1)
        except zlib.error:
            raise BodyRefused(400, "Invalid gzip payload") from None
        if len(body) > self._max_bytes:
            raise self._too_large()
        if not unpacker.eof:
            raise BodyRefused(400, "Invalid gzip payload")
        return body

    def _too_large(self) -> BodyRefused:
        return BodyRefused(413, f"request body above the limit of {self._max_bytes} bytes")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then what the connection says, so that a disconnect is still heard."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
