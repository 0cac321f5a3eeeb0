"""JSON form of requests and completions, for engines of other processes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict

from colocated_grpo.rollout.engine import Request, Sampling
from colocated_grpo.types import Completion, JsonObject

CONFLICT = 409
"""HTTP status of requests that need other weights than the server has, or whose client has no open stream."""


def request_message(request: Request) -> JsonObject:
    """Return the request without its key, which the connection replaces by a number."""
    return {
        "token_ids": request.token_ids,
        "seed": request.seed,
        "sampling": asdict(request.sampling),
        "pattern": request.pattern,
        "stream": request.stream,
    }


def read_request(key: Hashable, message: JsonObject) -> Request:
    """Return the request in `message`, under `key`. Raises KeyError or TypeError for another process's mistake."""
    # JSON has no tuples.
    sampling: JsonObject = {
        name: tuple(value) if isinstance(value, list) else value for name, value in message["sampling"].items()
    }
    return Request(
        key=key,
        token_ids=message["token_ids"],
        seed=message["seed"],
        sampling=Sampling(**sampling),
        pattern=message["pattern"],
        stream=message["stream"],
    )


def completion_message(completion: Completion) -> JsonObject:
    return asdict(completion)


def read_completion(message: JsonObject) -> Completion:
    return Completion(**message)
