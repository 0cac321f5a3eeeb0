"""Calls to one engine server (`python -m colocated_grpo.servers`)."""

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
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
BUSY_SECONDS = 75.0
"""Time for another trainer to end. A server notices within a minute that a trainer's machine is gone."""
CONFLICT = 409
"""Another trainer is attached, or this one is not, or the requests need another version of the weights."""
ADVICE = {
    401: "; name the variable with the server's key in engine.api_key_variable",
    404: "; this is not an engine server, or an older one: start it with colocated-grpo serve",
}
"""By status of a rejected call."""
TRAINER_HEADER = "X-Trainer"
"""Name of the header with the secret of a trainer, the same on all of its ranks."""

T = TypeVar("T")
Messages = SimpleQueue[JsonObject | None]


class EngineServer:
    """A server's routes for trainers. Calls raise Unavailable or RequestRejected, except
    those documented to raise RunError.

    While a trainer has a stream open, it is attached to the server: no other client controls the engine.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        trainer: str,
        timeout: float,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        """trainer: secret of this trainer, the same on all of its ranks. timeout: seconds for the server to start, and
        for calls that wait for the engine."""
        self._stop_requested = stop_requested
        self.url = url.rstrip("/")
        self.host = urlsplit(self.url).hostname or ""
        self.timeout = timeout
        self._http = JsonClient(self.url, timeout=CALL_SECONDS, api_key=api_key, headers={TRAINER_HEADER: trainer})
        self.client = secrets.token_hex(16)
        """Name of this rank at the server."""
        self._messages: Messages | None = None
        """The last stream, while it is open."""
        self._instance = ""

    def info(self) -> JsonObject:
        """Attach to the server; return /bridge/info: model, limits, `instance` (one per start), `policy_version`."""
        info = self._http.get("/bridge/info")
        if not isinstance(info, dict) or "instance" not in info:
            raise Unavailable(f"{self.url}/bridge/info is not an engine server's; start one with colocated-grpo serve")
        if self._messages is None or self._instance != info["instance"]:
            self.stream()
            self._instance = info["instance"]
        return info

    def adapters(self) -> JsonObject:
        """Return /lora/status."""
        return cast(JsonObject, self._http.get("/lora/status"))

    def wait_until_ready(self) -> JsonObject:
        """Return `info` once the server responds. Raises RunError."""
        return self.until_answered(self.info)

    def until_answered(self, call: Callable[[], T]) -> T:
        """Repeat the call while it raises Unavailable, for at most `timeout` seconds. Raises RunError."""
        begun = time.monotonic()
        while True:
            try:
                return call()
            except RequestRejected as error:
                if error.status != CONFLICT or time.monotonic() > begun + BUSY_SECONDS:
                    raise RunError(f"engine.urls={self.url}: {error}{ADVICE.get(error.status, '')}") from None
                reason = str(error)
            except Unavailable as error:
                reason = str(error)
            if self._stop_requested():
                raise RunError(f"engine.urls={self.url}: stopped while waiting for the server ({reason})")
            if time.monotonic() > begun + self.timeout:
                raise RunError(
                    f"engine.urls={self.url}: no answer within engine.server_timeout={self.timeout:g} s ({reason}); "
                    "start it with colocated-grpo serve, or look into its log"
                )
            time.sleep(RETRY_SECONDS)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """POST a request whose response waits for the engine."""
        return self._http.post(path, body or {}, self.timeout)

    def post_or_end(self, path: str, body: Mapping[str, object] | None = None) -> JsonObject:
        """POST a request that must succeed for the run to continue. Raises RunError."""
        try:
            return self.post(path, body)
        except (Unavailable, RequestRejected) as error:
            raise RunError(f"engine.urls={self.url}: POST {path} failed: {error}") from None

    def stream(self) -> Messages:
        """Open a stream in place of the last one, whose requests the server aborts. It ends with None."""
        lines = self._http.lines(f"/engine/stream?client={self.client}", SILENT_SECONDS)
        next(lines)  # confirms that the server is ready for requests
        self._messages = messages = Messages()
        threading.Thread(target=self._read, args=(lines, messages), name="engine server", daemon=True).start()
        return messages

    def close(self) -> None:
        """End the stream, which aborts its requests."""
        with suppress(Unavailable, RequestRejected):
            self._http.post("/engine/abort", {"client": self.client, "ids": None})

    def _read(self, lines: Iterator[str], messages: Messages) -> None:
        with suppress(Unavailable, RequestRejected, ValueError):  # the next call to the server shows the cause
            for line in lines:
                messages.put(json.loads(line))
        if self._messages is messages:
            self._messages = None
        messages.put(None)
