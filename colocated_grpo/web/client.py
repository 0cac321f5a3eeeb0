"""A JSON client built on the standard library, for servers that restart or return malformed responses."""

import json
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, HTTPMessage, HTTPResponse, IncompleteRead
from typing import IO, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from colocated_grpo.errors import visible

HEADERS = {"Accept-Encoding": "gzip", "Content-Type": "application/json"}
MAX_RESPONSE_BYTES = 1 << 30
"""Limit after decompression: enough for a batch of tens of millions of tokens."""
READ_BYTES = 1 << 20
T = TypeVar("T")
MAX_ERROR_BYTES = 1 << 16


class _RedirectsWithoutKey(HTTPRedirectHandler):
    """Sends the key to the origin that it is meant for, and follows a redirect to another origin without it."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urlsplit(new.full_url)[:2] != urlsplit(req.full_url)[:2]:
            new.remove_header("Authorization")
        return new


# No proxy: the servers are on this machine or in its cluster, out of reach of a proxy for internet access.
_opener = build_opener(ProxyHandler({}), _RedirectsWithoutKey)


class Unavailable(Exception):
    """No usable response: connection failure, timeout, 5xx, or invalid JSON. The request may be retried."""


class RequestRejected(Exception):
    """The server rejected the request with a 4xx status. A retry would fail in the same way."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def until_available(call: Callable[[], T], seconds: float, pause: float) -> T:
    """Repeat a call, with pauses, while it raises Unavailable; after `seconds`, raise its last error."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except Unavailable:
            if time.monotonic() >= deadline:
                raise
        time.sleep(pause)


class JsonClient:
    """GET and POST of JSON. Every call raises Unavailable or RequestRejected on failure."""

    def __init__(
        self, url: str, *, timeout: float, api_key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """timeout: seconds for the whole response, and for each socket operation. headers: further ones."""
        self._url = url.rstrip("/")
        self._timeout = timeout
        key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._headers = {**HEADERS, **key, **(headers or {})}

    def get(self, path: str, timeout: float | None = None) -> object:
        """timeout: for this call, in place of the client's."""
        return self._call(Request(self._url + path, headers=self._headers), timeout or self._timeout)

    def post(self, path: str, body: object, timeout: float | None = None) -> object:
        return self._call(Request(self._url + path, json.dumps(body).encode(), self._headers), timeout or self._timeout)

    def lines(self, path: str, silence: float, body: object = None) -> Iterator[str]:
        """Yield the lines of a streamed response, without empty lines. Raises Unavailable at the end.

        silence: seconds without data after which the connection counts as lost. body: of a POST; None: a GET.
        """
        request = Request(self._url + path, None if body is None else json.dumps(body).encode(), self._headers)
        with _failures(), _opener.open(request, timeout=silence) as response:
            for line in response:
                if text := line.decode().strip():
                    yield text
        raise Unavailable("the server has ended the response")

    def _call(self, request: Request, timeout: float) -> object:
        """Return the parsed JSON, or a string if neither the content type nor the first character is that of JSON."""
        with _failures():
            with _opener.open(request, timeout=timeout) as response:
                raw, headers = _read(response, timeout), response.headers
            body = gunzip(raw, MAX_RESPONSE_BYTES) if headers.get("Content-Encoding") == "gzip" else raw
            is_json = "json" in headers.get("Content-Type", "") or body[:1] == b"{"
            return json.loads(body) if is_json else body.decode(errors="replace")


def _read(response: HTTPResponse, timeout: float) -> bytes:
    """Return the body, in blocks: read() would allocate Content-Length bytes, and each byte restarts the timeout."""
    deadline, body = time.monotonic() + timeout, bytearray()
    while block := response.read1(READ_BYTES):
        body += block
        if len(body) > MAX_RESPONSE_BYTES:
            raise TooLarge
        if time.monotonic() > deadline:
            raise TimeoutError(f"the response takes longer than {timeout:g} s")
    if response.length:
        raise IncompleteRead(b"", response.length)
    return bytes(body)


@contextmanager
def _failures() -> Generator[None]:
    """Convert errors of a request to Unavailable and RequestRejected."""
    try:
        yield
    except HTTPError as error:
        message = visible(" ".join(f"{error.code} {_error_message(error) or error.reason}".split()))
        raise (RequestRejected(message, error.code) if 400 <= error.code < 500 else Unavailable(message)) from None
    except TooLarge:
        raise Unavailable(f"the response is larger than {MAX_RESPONSE_BYTES} bytes") from None
    except (OSError, HTTPException, zlib.error, ValueError, RecursionError) as error:
        inner = getattr(error, "reason", error)  # the exception that urllib has wrapped
        raise Unavailable(visible(" ".join(str(inner).split())) or type(inner).__name__) from None


def _error_message(error: HTTPError) -> str | None:
    """Return the message of an error in OpenAI's format; None for another body."""
    try:
        return str(json.loads(error.read(MAX_ERROR_BYTES))["error"]["message"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError, RecursionError):
        return None


class TooLarge(Exception):
    """The decompressed body exceeds the limit."""


def gunzip(compressed: bytes, max_bytes: int) -> bytes:
    """Decompress one gzip member. Raises TooLarge above `max_bytes`, zlib.error for corrupt or truncated data."""
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    body = decompressor.decompress(compressed, max_bytes + 1)
    if len(body) > max_bytes:
        raise TooLarge
    if not decompressor.eof:
        raise zlib.error("truncated gzip data")
    return body
