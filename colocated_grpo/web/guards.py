"""Middleware for servers that others may reach: who may ask, and how many at once."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


def refusal(status: int, reason: str, **headers: str) -> JSONResponse:
    return JSONResponse(refusal_body(status, reason), status, headers=headers)


def refusal_body(status: int, reason: str) -> dict[str, Any]:
    """In the form of OpenAI's API, which its clients show to people."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": reason, "type": kind, "code": status}}


class ApiKey:
    """401 unless the request brings `Authorization: Bearer <key>`; `open_paths` are answered to everybody."""

    def __init__(self, app: ASGIApp, key: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            # Constant time: how long a comparison takes must not tell how much of a guess is right.
            if not hmac.compare_digest(given, self._expected):
                await refusal(401, "this server needs its API key")(scope, receive, send)
                return
        await self._app(scope, receive, send)


class AtMost:
    """503 for requests beyond `most` at one time; `free_paths` do not count."""

    def __init__(self, app: ASGIApp, most: int, free_paths: Collection[str]) -> None:
        self._app = app
        self._most = most
        self._free_paths = free_paths
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._free_paths:
            await self._app(scope, receive, send)
            return
        if self._held >= self._most:
            answer = refusal(503, f"{self._most} requests are under way; try again later", **{"Retry-After": "1"})
            await answer(scope, receive, send)
            return
        self._held += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._held -= 1
