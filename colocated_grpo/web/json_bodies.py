"""Parsing of request bodies that `BodyLimit` has read, without blocking the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request

from colocated_grpo.web.bodies import INLINE_BYTES, off_the_loop
from colocated_grpo.web.shape import TooComplex

T = TypeVar("T")


class InvalidBody(Exception):
    """A request body that cannot be parsed. The message is one line for the client."""


async def read_json(request: Request, decode: Callable[[bytes], T]) -> T:
    """Return the decoded body of the request. Raises InvalidBody.

    decode: may raise InvalidBody, TooComplex or msgspec's errors. Large bodies are decoded on another thread.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidBody("the Content-Type must be application/json")
    # `request.body()` would keep the bytes until the response, which may be hours later.
    body = (await request.receive()).get("body", b"")
    if len(body) <= INLINE_BYTES:
        return _decoded(body, decode)
    return await off_the_loop(lambda: _decoded(body, decode))


def _decoded(body: bytes, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise InvalidBody(_with_the_place_first(str(error))) from None
    except RecursionError:
        raise InvalidBody("nested too deep") from None
    except (msgspec.DecodeError, TooComplex) as error:
        raise InvalidBody(str(error)) from None


def _with_the_place_first(message: str) -> str:
    """Return "n: Expected `int`" for msgspec's "Expected `int` - at `$.n`"."""
    problem, found, place = message.rpartition(" - at `$")
    place = place.removesuffix("`").lstrip(".")
    return f"{place}: {problem}" if found and place else problem or message
