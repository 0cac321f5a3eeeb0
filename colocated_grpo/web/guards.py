"""ASGI middleware for servers that other machines may reach: API key and concurrency limit."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from colocated_grpo.types import JsonObject


def error_response(status: int, message: str, **headers: str) -> JSONResponse:
    return JSONResponse(error_body(status, message), status, headers=headers)


def error_body(status: int, message: str) -> JsonObject:
    """Return an error in OpenAI's format, whose message OpenAI clients show to the user."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}


class RequireApiKey:
    """Respond 401 unless a request has the key: as a bearer token, or as the password of Basic authentication, which
    HTTP clients send for a URL such as `http://any:KEY@host`. `public_paths` need no key."""

    def __init__(self, app: ASGIApp, key: str, public_paths: Collection[str]) -> None:
        self._app = app
        self._key = key.encode()
        self._public_paths = public_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._public_paths or self._has_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            await error_response(401, "this server requires its API key")(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        # Constant time: the duration of an ordinary comparison reveals how many leading characters are right.
        return hmac.compare_digest(key_in(headers.get("authorization", "")), self._key)


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
    """Respond 503 with Retry-After while `limit` requests are in flight. `exempt_paths` do not count."""

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
            message = f"{self._limit} requests are in flight; try again later"
            await error_response(503, message, **{"Retry-After": "1"})(scope, receive, send)
            return
        self._in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1
