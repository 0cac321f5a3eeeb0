"""Runs an ASGI application on a thread of this process, behind middleware that rejects unwanted requests.

Rejected are requests without the key, above the concurrency limit, or from web pages, whose browser on this machine
reaches its local ports. Browsers mark requests of other sites with `Origin` or `Sec-Fetch-Site`. A site that makes its
own name resolve to this machine (DNS rebinding) is recognised by its name in `Host`.
"""

import asyncio
import base64
import binascii
import hmac
import resource
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from colocated_grpo.errors import visible
from colocated_grpo.runtime.program import DESCRIPTORS, raise_descriptor_limit
from colocated_grpo.settings.atropos import is_address, is_wildcard
from colocated_grpo.types import JsonObject

NOTE_SECONDS = 10.0


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, message), status, headers)


def error_body(status: int, message: str) -> JsonObject:
    """Return an error in OpenAI's format, so that OpenAI clients show the message to the user."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}


class RareNote:
    """Log at most one line in NOTE_SECONDS: clients can cause thousands of lines per second."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._due = note, 0.0

    def __call__(self, line: str) -> None:
        if (now := time.monotonic()) >= self._due:
            self._due = now + NOTE_SECONDS
            self._note(visible(line))


@dataclass(eq=False, repr=False)  # its repr would show the key
class RequireApiKey:
    """Respond 401 to requests without the key. The key is a bearer token, or the password in Basic authentication,
    which HTTP clients send for a URL such as `http://any:KEY@host`. `public_paths` need no key."""

    app: ASGIApp
    key: str
    public_paths: Collection[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in self.public_paths:
            given = key_in(Headers(scope=scope).get("authorization", ""))
            # Constant time: the duration of an ordinary comparison reveals how many leading characters are correct.
            if not hmac.compare_digest(given, self.key.encode()):
                await error_response(401, "this server requires its API key")(scope, receive, send)
                return
        await self.app(scope, receive, send)


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


@dataclass(eq=False)
class ConcurrencyLimit:
    """Respond 503 with Retry-After while `limit` requests are in flight. Requests for `exempt_paths` do not count."""

    app: ASGIApp
    limit: int
    exempt_paths: Collection[str]
    in_flight: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self.exempt_paths:
            await self.app(scope, receive, send)
            return
        if self.in_flight >= self.limit:
            problem = f"{self.limit} requests are in flight; try again later"
            await error_response(503, problem, {"Retry-After": "1"})(scope, receive, send)
            return
        self.in_flight += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.in_flight -= 1


LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
OTHER_SITES = frozenset({"cross-site", "same-site"})
"""Values of Sec-Fetch-Site. A page on another port of this machine is `same-site`."""


class Hosts:
    """The `Host` values that a server accepts."""

    def __init__(self, bound: str, names: Iterable[str] = ()) -> None:
        """bound: the address that the server listens on. names: further host names used by clients.

        Bound to all, it accepts this machine's name, and any address: no page can make one resolve to another machine.
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


@dataclass(eq=False)
class OwnRequests:
    """Respond 403 to requests with an unknown `Host`, and to requests from pages of other sites."""

    app: ASGIApp
    hosts: Hosts | None
    """None accepts any `Host`, for servers that require a key, because web pages do not have the key."""
    origins: Collection[str] = ()
    """Origins of pages that may send requests, such as `http://localhost:3000`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if problem := self._problem(Headers(scope=scope)):
            await error_response(403, problem)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _problem(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.hosts is not None and not self.hosts.accept(host):
            return f"Host {host[:100]!r}: this server answers to {self.hosts}; allow further names where it is started"
        if origin is None:
            foreign = headers.get("sec-fetch-site") in OTHER_SITES
        else:
            foreign = origin not in self.origins and origin.partition("://")[2].lower() != host.lower()
        return "requests from web pages of other sites are not accepted" if foreign else None


BACKLOG = 2048
SHUTDOWN_SECONDS = 1
"""Time for open connections to finish when the server closes."""
IDLE_SECONDS = 60.0
"""A connection is closed after this time without a complete request head, without a next request, without a byte read
of a response that waits, or without a sign of life from a machine that is gone."""


def max_client_connections() -> int:
    """Return the maximum connections of a server: three quarters of the descriptor limit. The rest is for the run."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (DESCRIPTORS if soft == resource.RLIM_INFINITY else soft) * 3 // 4


class Connection(H11Protocol):
    """A connection with limits on count, idle time and head size, so that clients cannot exhaust the process.

    The 16 KiB head limit is h11's own. uvicorn's faster parser, httptools, has no limit.
    """

    _timer: asyncio.TimerHandle | None = None
    _unread: int | None = None
    """Bytes that the client had to read at the previous check; None if it has read them since."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > max_client_connections():
            transport.abort()
            return
        client: socket.socket = transport.get_extra_info("socket")
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(IDLE_SECONDS * 1000))
        self._check_later(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._unread = None
        super().pause_writing()

    def _check_later(self, last: object) -> None:
        self._timer = self.loop.call_later(IDLE_SECONDS, self._check_idle, last)

    def _check_idle(self, last: object) -> None:
        """Close the connection unless a request was received, answered or read from since the previous check.

        last: the request cycle complete at that check, if any, or this connection itself if a response was pending.
        """
        before, self._unread = self._unread, self.transport.get_write_buffer_size() if self.flow.write_paused else None
        if self.cycle is last or (before is not None and before == self._unread):
            self.transport.abort()
        else:
            self._check_later(self.cycle if self.cycle.response_complete else self)


class ServerThread:
    """A server that accepts requests as soon as it is constructed. Raises OSError if the address cannot be bound."""

    def __init__(self, app: ASGIApp, host: str, ports: Sequence[int]) -> None:
        """ports: 0 selects any free port; `self.ports` has the actual ports."""
        raise_descriptor_limit()
        with ExitStack() as opened:
            sockets = [opened.enter_context(_listen(host, port)) for port in ports]
            self._close_sockets = opened.pop_all().close
        self.ports: list[int] = [listener.getsockname()[1] for listener in sockets]
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_config=None,
            log_level="error",  # uvicorn warns about every malformed request
            access_log=False,
            lifespan="off",  # this and ws: the middleware handles HTTP only
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=(sockets,), name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, allow open requests SHUTDOWN_SECONDS to finish, and join the thread."""
        self._server.should_exit = True
        self._thread.join()
        self._close_sockets()


def _listen(host: str, port: int) -> socket.socket:
    # Not `socket.create_server`, whose server at "::" rejects IPv4.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from None
    return listener
