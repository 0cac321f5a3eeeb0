"""Requests and completions between processes: their JSON, and the requests of a peer in this process's inbox."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Annotated

from pydantic import ConfigDict, Field

from colocated_grpo.rollout.engine import Request, Sampling, TokenDelta
from colocated_grpo.rollout.inbox import Inbox
from colocated_grpo.servers.request_bodies import StrictBody, TokenIds
from colocated_grpo.types import Completion, JsonObject

CONFLICT = 409
"""HTTP status of requests that need other weights than the server has, or whose client has no open stream."""
SEED_LIMIT = 1 << 63

Number = Annotated[int, Field(ge=0, lt=SEED_LIMIT)]


def request_message(number: int, request: Request) -> JsonObject:
    """Return the request under a number of the sender in place of its key. `RequestBody` reads it."""
    return {
        "id": number,
        "token_ids": request.token_ids,
        "seed": request.seed,
        "sampling": asdict(request.sampling),
        "pattern": request.pattern,
        "stream": request.stream,
    }


class RequestBody(StrictBody):
    """A request as `request_message` writes it."""

    model_config = ConfigDict(allow_inf_nan=False)
    id: Number
    token_ids: TokenIds
    seed: int = Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)
    sampling: Sampling
    pattern: str | None
    stream: bool

    def request(self, key: Hashable) -> Request:
        return Request(
            key=key,
            token_ids=self.token_ids,
            seed=self.seed,
            sampling=self.sampling,
            pattern=self.pattern,
            stream=self.stream,
        )


class PeerRequests:
    """Requests of one peer in this process's inbox. Each is answered by one message:

    `completion`, or `error` if the engine has rejected it, or neither if the engine has stopped. Messages with `delta`
    precede it if the request streams.
    """

    def __init__(self, peer: str, inbox: Inbox, send: Callable[[JsonObject], None]) -> None:
        """peer: first part of the requests' keys. send: called on the thread that drives the engine."""
        self._peer = peer
        self._inbox = inbox
        self._send = send
        self._futures: dict[int, Future[Completion]] = {}

    def put(self, bodies: Sequence[RequestBody]) -> None:
        """Queue the requests at once, so that the engine admits them in the same step."""
        entries = [
            (body.request((self._peer, body.id)), partial(self._send_delta, body.id) if body.stream else None)
            for body in bodies
        ]
        for body, future in zip(bodies, self._inbox.put_all(entries), strict=True):
            self._futures[body.id] = future
            future.add_done_callback(partial(self._send_result, body.id))

    def cancel(self, numbers: Iterable[int] | None = None) -> None:
        """Abort these requests, or all. They get no message."""
        for number in list(self._futures) if numbers is None else numbers:
            if (future := self._futures.pop(number, None)) is not None:
                future.cancel()

    def _send_delta(self, number: int, delta: TokenDelta) -> None:
        self._send({"id": number, "delta": delta})

    def _send_result(self, number: int, done: Future[Completion]) -> None:
        if self._futures.pop(number, None) is None:
            return  # cancelled by the peer
        message: JsonObject = {"id": number}
        if not done.cancelled():
            error = done.exception()
            message |= {"completion": asdict(done.result())} if error is None else {"error": str(error)}
        self._send(message)
