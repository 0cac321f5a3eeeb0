"""Calls to one engine server (`python -m colocated_grpo.servers`)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from colocated_grpo.errors import RunError
from colocated_grpo.types import JsonObject
from colocated_grpo.web.client import JsonClient, RequestRejected, Unavailable

CALL_SECONDS = 30.0
"""Timeout of calls that need no work by the engine."""
SILENT_SECONDS = 30.0
"""A stream without a message for this long is closed. The server sends an empty line every 5 seconds."""
RETRY_SECONDS = 0.25
UNAUTHORIZED, NOT_FOUND = 401, 404

T = TypeVar("T")
Messages = SimpleQueue[JsonObject | None]


class EngineServer:
    """The routes of one server that a trainer uses. Every method but `stream` waits for the response."""

    def __init__(
        self, url: str, api_key: str | None, timeout: float, stop_requested: Callable[[], bool] = lambda: False
    ) -> None:
        """timeout: seconds for the server to start, and for calls that wait for the engine."""
        self._stop_requested = stop_requested
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._quick = JsonClient(self.url, timeout=CALL_SECONDS, api_key=api_key)
        self._patient = JsonClient(self.url, timeout=timeout, api_key=api_key)

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    def info(self) -> JsonObject:
        """Return /bridge/info: model, limits, `instance` (one per start) and `policy_version`. Raises Unavailable."""
        info = self._quick.get("/bridge/info")
        if not isinstance(info, dict) or "instance" not in info:
            raise Unavailable(f"{self.url}/bridge/info is not an engine server's; start one with colocated-grpo serve")
        return info

    def adapters(self) -> JsonObject:
        """Return /lora/status. Raises Unavailable or RequestRejected."""
        return cast(JsonObject, self._quick.get("/lora/status"))

    def wait_until_ready(self) -> JsonObject:
        """Return `info` once the server responds. Raises RunError."""
        return self.until_answered(self.info)

    def until_answered(self, call: Callable[[], T]) -> T:
        """Repeat the call while it raises Unavailable, for at most `timeout` seconds. Raises RunError."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return call()
            except RequestRejected as error:
                raise RunError(f"engine.urls={self.url}: {error}{_advice(error)}") from None
            except Unavailable as error:
                reason = str(error)
            if self._stop_requested():
                raise RunError(f"engine.urls={self.url}: stopped while waiting for the server ({reason})")
            if time.monotonic() > deadline:
                raise RunError(
                    f"engine.urls={self.url}: no answer within engine.server_timeout={self.timeout:g} s ({reason}); "
                    "start it with colocated-grpo serve, or look into its log"
                )
            time.sleep(RETRY_SECONDS)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """POST a request whose response waits for the engine. Raises Unavailable or RequestRejected."""
        return self._patient.post(path, body or {})

    def post_or_end(self, path: str, body: Mapping[str, object] | None = None) -> JsonObject:
        """POST a request that must succeed for the run to continue. Raises RunError."""
        try:
            return self.post(path, body)
        except (Unavailable, RequestRejected) as error:
            raise RunError(f"engine.urls={self.url}: POST {path} failed: {error}") from None

    def stream(self, path: str) -> Messages:
        """Return a queue that receives the messages of a streamed response, and None at its end.

        The stream's first line only confirms that the server is ready for requests, and is not queued.
        """
        messages: Messages = SimpleQueue()
        opened = threading.Event()

        def read() -> None:
            try:
                for line in self._quick.lines(path, SILENT_SECONDS):
                    if opened.is_set():
                        messages.put(json.loads(line))
                    opened.set()
            except (Unavailable, RequestRejected, ValueError):
                pass  # end of the stream; the next call to the server shows the cause
            messages.put(None)
            opened.set()

        threading.Thread(target=read, name="engine server", daemon=True).start()
        opened.wait(CALL_SECONDS)
        return messages


def _advice(error: RequestRejected) -> str:
    if error.status == UNAUTHORIZED:
        return "; name the variable with the server's key in engine.api_key_variable"
    if error.status == NOT_FOUND:
        return "; this is not an engine server, or an older one: start it with colocated-grpo serve"
    return ""
