"""Middleware that rejects requests without the key, above the concurrency limit, or from web pages.

A web page in a browser on this machine can send requests to local ports that other machines cannot reach. Browsers mark
requests of other sites with `Origin` or `Sec-Fetch-Site`. A site that makes its own name resolve to this machine (DNS
rebinding) appears to be the same site, but is recognised by its name in `Host`.
"""

import base64
import binascii
import hmac
import socket
from collections.abc import Callable, Collection, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from colocated_grpo.settings.atropos import is_address, is_wildcard
from colocated_grpo.types import JsonObject

ErrorResponse = Callable[[int, str], Response]
"""Builds a response from a status and a message."""


def error_response(status: int, message: str) -> JSONResponse:
    return JSONResponse(error_body(status, message), status)


def error_body(status: int, message: str) -> JsonObject:
    """Return an error in OpenAI's format, so that OpenAI clients show the message to the user."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}


class RequireApiKey:
    """Respond 401 to requests without the key. The key is a bearer token, or the password in Basic authentication,
    which HTTP clients send for a URL such as `http://any:KEY@host`. `public_paths` need no key."""

    def __init__(self, app: ASGIApp, key: str, public_paths: Collection[str]) -> None:
        self._app = app
        self._key = key.encode()
        self._public_paths = public_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._public_paths:
            given = key_in(Headers(scope=scope).get("authorization", ""))
            # Constant time: the duration of an ordinary comparison reveals how many leading characters are correct.
            if not hmac.compare_digest(given, self._key):
                await error_response(401, "this server requires its API key")(scope, receive, send)
                return
        await self._app(scope, receive, send)


def key_in(authorization: str) -> bytes:
    """Return the key of an Authorization header; empty for other schemes."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.encode("latin-1")
    try:
        credentials = base64.b64decode(value, validate=True) if scheme.lower() == "basic" else b""
    except (binascii.Error, ValueError):
        return b""
    return credentials.partition(b":")[2]


class ConcurrencyLimit:
    """Respond 503 with Retry-After while `limit` requests are in flight. Requests for `exempt_paths` do not count."""

    def __init__(self, app: ASGIApp, limit: int, exempt_paths: Collection[str]) -> None:
        self._app = app
        self._limit = limit
        self._exempt_paths = exempt_paths
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._exempt_paths:
            await self._app(scope, receive, send)
            return
        if self._in_flight >= self._limit:
            response = error_response(503, f"{self._limit} requests are in flight; try again later")
            response.headers["Retry-After"] = "1"
            await response(scope, receive, send)
            return
        self._in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1


LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
OTHER_SITES = frozenset({"cross-site", "same-site"})
"""Values of Sec-Fetch-Site. A page on another port of this machine is `same-site`."""


class Hosts:
    """The `Host` values that a server accepts."""

    def __init__(self, bound: str, names: Iterable[str] = ()) -> None:
        """bound: the address that the server listens on. names: further host names used by clients.

        A server bound to all addresses accepts each address of the machine, and the machine's own name. Numeric
        addresses are safe, because a page cannot make a numeric address resolve to another machine.
        """
        self._any_address = is_wildcard(bound)
        own = socket.gethostname() if self._any_address else bound
        self._names = LOOPBACK_NAMES | {name.lower().strip("[]") for name in [own, *names]}

    def accept(self, host: str) -> bool:
        """Return True for an accepted `Host`. host: the value of the header, with or without a port."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # such as an unclosed bracket
            return False
        return name in self._names or (self._any_address and is_address(name))

    def __str__(self) -> str:
        return ", ".join(sorted(self._names)) + (" and this machine's addresses" if self._any_address else "")


class OwnRequests:
    """Respond 403 to requests with an unknown `Host`, and to requests from pages of other sites."""

    def __init__(
        self, app: ASGIApp, hosts: Hosts | None, error_response: ErrorResponse, origins: Collection[str] = ()
    ) -> None:
        """hosts: None accepts any `Host`, for servers that require a key, because web pages do not have the key.
        origins: origins of pages that may send requests, such as `http://localhost:3000`."""
        self._app = app
        self._hosts = hosts
        self._error_response = error_response
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._problem(Headers(scope=scope))):
            await self._error_response(403, problem)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._hosts is not None and not self._hosts.accept(host):
            return f"Host {host[:100]!r}: this server answers to {self._hosts}; allow further names where it is started"
        if origin is None:
            foreign = headers.get("sec-fetch-site") in OTHER_SITES
        else:
            foreign = origin not in self._origins and not _is_at(host, origin)
        return "requests from web pages of other sites are not accepted" if foreign else None


def is_from_browser(headers: Headers) -> bool:
    """Return True for requests of a browser. Browsers without Sec-Fetch-Site are recognised by User-Agent."""
    return "sec-fetch-site" in headers or headers.get("user-agent", "").startswith("Mozilla/")


def _is_at(host: str, origin: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False
