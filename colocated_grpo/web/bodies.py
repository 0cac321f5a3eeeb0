"""Request bodies: read, decompressed, checked and parsed within limits of size, memory and time.

The structure of JSON is bounded before it is parsed: `[],` is three bytes of text and a 56-byte object.
"""

import asyncio
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeVar

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colocated_grpo.web.client import TooLarge, gunzip
from colocated_grpo.web.server import error_response

NO_BRACKETS = bytes(set(range(256)).difference(b"[]{}"))
STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
"""Change of depth at each bracket."""


@dataclass(frozen=True, kw_only=True)
class BodyShape:
    """Maximum structure of a JSON text. Brackets and commas in strings do not count."""

    values: int
    """All entries of lists and objects, and the lists and objects themselves."""
    containers: int
    strings: int
    """Strings, including keys."""
    depth: int

    def check(self, text: bytes) -> None:
        """Raise HTTPException above a bound, in time linear in the length. The text need not be valid JSON."""
        # Counts over the whole text are upper bounds, which are sufficient for most texts.
        opened = text.count(b"[") + text.count(b"{")
        if (
            opened <= min(self.depth, self.containers)
            and text.count(b'"') // 2 <= self.strings
            and text.count(b",") + opened <= self.values
        ):
            return
        # Not a regular expression: it would stop all other threads, such as the one that drives the engine, for longer.
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")  # now each quote begins or ends a string
        outside = b"".join(text.split(b'"', 2 * self.strings + 1)[::2])
        containers = outside.count(b"[") + outside.count(b"{")
        for count, bound, name in (
            ((text.count(b'"') + 1) // 2, self.strings, "strings"),
            (containers, self.containers, "lists and objects"),
            (outside.count(b",") + containers, self.values, "values"),
        ):
            if count > bound:
                raise HTTPException(400, f"the request body has more than {bound} {name}")
        depths = accumulate(map(STEPS.__getitem__, outside.translate(None, NO_BRACKETS)))
        if max(depths, default=0) > self.depth:
            raise HTTPException(400, f"the request body has more than {self.depth} levels of nesting")


T = TypeVar("T")

BODY_SECONDS = 60.0
"""Time limit from the end of the headers to the end of the body."""
MAX_ARRIVING = 1024
"""Unfinished bodies of a server. One more ends the oldest: a body of an ordinary client is complete within moments."""
GRACE_SECONDS = 5.0
"""When the memory for large bodies is full, a body that has taken longer than this time is rejected to make room."""
SMALL_BYTES = 1 << 16
"""Bodies up to this size are always accepted, so that a client with large bodies cannot block all other clients."""
INLINE_BYTES = 1 << 18
"""Bodies up to this size are checked and parsed on the event loop, within a few milliseconds."""
BUFFERED_BODIES = 4
"""The memory for large bodies fits this number of bodies of the maximum size."""
OTHER_BYTES = 1 << 20
"""Size limit of bodies on paths that expect small bodies."""

_worker = ThreadPoolExecutor(1, thread_name_prefix="bodies")
"""One thread for all servers of the process, so that at most one body is checked and parsed at a time."""


async def off_the_loop(work: Callable[[], T]) -> T:
    """Run `work` on the thread for large bodies, while the event loop handles other requests."""
    return await asyncio.get_running_loop().run_in_executor(_worker, work)


@dataclass(eq=False)
class BodyLimit:
    """Pass on each request with its complete, decompressed body, or respond with an error.

    413: above `max_bytes` after decompression. 503: other large bodies fill the memory reserved for large bodies. 408:
    after BODY_SECONDS, or for the oldest of more than MAX_ARRIVING. 400: corrupt gzip, two statements of the length, or
    structure beyond `shape`.
    """

    app: ASGIApp
    max_bytes: int
    shape: BodyShape
    large_paths: Collection[str]
    """Paths with limit `max_bytes`. All other paths have the limit OTHER_BYTES, or `max_bytes` if that is lower."""

    def __post_init__(self) -> None:
        self._room = BUFFERED_BODIES * self.max_bytes
        """Bytes left for large bodies."""
        self._arriving: dict[Reservation, None] = {}
        """Incomplete bodies, oldest first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = self.max_bytes if scope["path"] in self.large_paths else min(self.max_bytes, OTHER_BYTES)
        clock = asyncio.timeout(BODY_SECONDS)
        reservation = Reservation(asyncio.get_running_loop().time(), lambda: clock.reschedule(0))
        try:
            try:
                async with clock:
                    body = await self._read(Headers(scope=scope), receive, reservation, most)
            except TimeoutError:
                message = f"the request body did not arrive within {BODY_SECONDS:g} s, or sooner while others wait"
                await error_response(408, message)(scope, receive, send)
                return
            except HTTPException as error:
                await error_response(error.status_code, error.detail, error.headers)(scope, receive, send)
                return
            headers = MutableHeaders(scope=scope)
            del headers["content-encoding"]
            headers["content-length"] = str(len(body))
            replayed = _replay(body, receive, partial(self._release, reservation))
            del body  # the application determines how long the body is kept
            await self.app(scope, replayed, send)
        finally:
            self._release(reservation)

    async def _read(self, headers: Headers, receive: Receive, reservation: "Reservation", most: int) -> bytes:
        if "content-length" in headers and "transfer-encoding" in headers:
            # Two servers in a row could disagree about where the next request begins.
            message = "Content-Length and Transfer-Encoding exclude each other"
            raise HTTPException(400, message, {"Connection": "close"})
        if int(headers.get("content-length", "0")) > most:
            raise _too_large(most)
        if len(self._arriving) >= MAX_ARRIVING:
            oldest = next(iter(self._arriving))
            del self._arriving[oldest]
            oldest.expire()
        self._arriving[reservation] = None
        received, more = bytearray(), True
        try:
            while more:
                message = await receive()
                received += message.get("body", b"")
                more = message.get("more_body", False)
                if len(received) > most:
                    raise _too_large(most)
                self._grow(reservation, len(received))
        finally:
            self._arriving.pop(reservation, None)
        body = bytes(received)
        del received  # one copy while it is decompressed
        if body and "gzip" in headers.get("content-encoding", "").lower():
            body = await off_the_loop(partial(_decompress, body, most))
            self._grow(reservation, len(body))
        if len(body) <= INLINE_BYTES:
            self.shape.check(body)
        else:
            await off_the_loop(partial(self.shape.check, body))
        return body

    def _grow(self, reservation: "Reservation", num_bytes: int) -> None:
        """Reserve memory for a large body. Raises HTTPException."""
        if num_bytes <= max(reservation.num_bytes, SMALL_BYTES):
            return
        now = asyncio.get_running_loop().time()
        for other in list(self._arriving):
            if num_bytes - reservation.num_bytes <= self._room or now - other.begun < GRACE_SECONDS:
                break
            other.expire()
            self._release(other)  # possibly the same reservation
        if (more := num_bytes - reservation.num_bytes) > self._room:
            raise HTTPException(503, "other large request bodies are being read; try again later")
        self._room -= more
        reservation.num_bytes = num_bytes

    def _release(self, reservation: "Reservation") -> None:
        self._room += reservation.num_bytes
        reservation.num_bytes = 0


@dataclass(eq=False)
class Reservation:
    """One request's reservation of memory for large bodies."""

    begun: float
    expire: Callable[[], None]
    """Rejects the body at once, to make room for other bodies."""
    num_bytes: int = 0


def _decompress(compressed: bytes, most: int) -> bytes:
    try:
        return gunzip(compressed, most)
    except zlib.error:
        raise HTTPException(400, "Invalid gzip payload") from None
    except TooLarge:
        raise _too_large(most) from None


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"the request body exceeds the limit of {most} bytes")


def _replay(body: bytes, receive: Receive, consumed: Callable[[], None]) -> Receive:
    """Return a `receive` of the body, then of the connection. consumed: called when the body has been parsed."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        if pending:
            return pending.pop()
        consumed()
        return await receive()

    return replay


class InvalidBody(Exception):
    """A request body that cannot be parsed. The message is one line for the client."""


async def read_json(request: Request, decode: Callable[[bytes], T]) -> T:
    """Return the decoded body. Raises InvalidBody. decode: may raise InvalidBody or msgspec's errors, on any thread."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidBody("the Content-Type must be application/json")
    # Not `request.body()`, which would keep the bytes until the response, possibly for hours.
    body = (await request.receive()).get("body", b"")
    work = partial(_decoded, body, decode)
    return work() if len(body) <= INLINE_BYTES else await off_the_loop(work)


def _decoded(body: bytes, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        # "n: Expected `int`" for msgspec's "Expected `int` - at `$.n`"
        problem, _, place = str(error).rpartition(" - at `$")
        place = place.removesuffix("`").lstrip(".")
        raise InvalidBody(f"{place}: {problem}" if problem and place else problem or str(error)) from None
    except RecursionError:
        raise InvalidBody("nested too deep") from None
    except UnicodeDecodeError:
        raise InvalidBody("the request body must be text in UTF-8") from None
    except msgspec.DecodeError as error:
        raise InvalidBody(str(error)) from None
