"""Protection from web pages: middleware that accepts only requests meant for this server.

A page in a browser on this machine can send requests to ports of it that other machines cannot reach. Browsers mark
the requests of other sites with `Origin` or `Sec-Fetch-Site`. A site that makes its own name resolve to this machine
(DNS rebinding) appears to be the same site; its name in `Host` gives it away.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from colocated_grpo.settings.atropos import is_address, is_wildcard

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
OTHER_SITES = frozenset({"cross-site", "same-site"})
"""Values of Sec-Fetch-Site. A page on another port of this machine is `same-site`."""


class Hosts:
    """The values of `Host` under which a server accepts requests."""

    def __init__(self, bound: str, names: Iterable[str] = ()) -> None:
        """bound: the address that the server listens on. names: further ones that clients use.

        A server on all addresses of its machine accepts each of them, and the machine's own name. Addresses as such
        are safe: a page cannot make a browser take an address for another.
        """
        self._any_address = is_wildcard(bound)
        own = socket.gethostname() if self._any_address else bound
        self._names = LOOPBACK_NAMES | {name.lower().strip("[]") for name in [own, *names]}

    def accept(self, host: str) -> bool:
        """host: the value of the header, with or without a port."""
        name = _name(host)
        return name in self._names or (self._any_address and is_address(name))

    def __str__(self) -> str:
        return ", ".join(sorted(self._names)) + (" and this machine's addresses" if self._any_address else "")


class OwnRequests:
    """Respond 403 to requests under an unknown `Host`, and to those that a page of another site sent."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Hosts | None,
        error_response: Callable[[int, str], Response],
        origins: Collection[str] = (),
    ) -> None:
        """hosts: None accepts any, for servers that require a key: pages do not know it. origins: of pages that may
        send requests, such as `http://localhost:3000`."""
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
            foreign = origin not in self._origins and _netloc(origin) != host.lower()
        return "requests from web pages of other sites are not accepted" if foreign else None


def is_from_browser(headers: Headers) -> bool:
    """True for requests of a browser, whatever the page. Ones too old for Sec-Fetch-Site still name themselves."""
    return "sec-fetch-site" in headers or headers.get("user-agent", "").startswith("Mozilla/")


def _name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:  # such as an unclosed bracket
        return ""


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None
