"""Requests that no honest client sends. Imports little: the senders run in processes of their own."""

from __future__ import annotations

import copy
import gzip
import json
import random
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import islice
from typing import Any, NamedTuple

from tests.support.hostile_bodies import bodies

NUM_BOMBS = 15
"""Bodies that `bodies` yields."""
SECONDS = 60.0
BROKEN_SECONDS = 0.1
"""How long to wait for a response to something that is no whole request."""
CLOSED = "closed"
"""Outcome of a request whose connection the server has closed without a response."""
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 256, 257, 65536, 1 << 31, 1 << 63, 1 << 64, 10**400, -(10**30), 1e308, -1e308, 5e-324,
    0.5, "", "a", "\x00", "null", "NaN", "\ud83d\ude00", "a" * 5000, "%s%n", "../../etc/passwd", "{{7*7}}", [], {},
    [[]], [None], [[None]], [{}], {"": {}}, [[1, [2, [3]]]], [1, "a"], [-1], [1 << 40], [float("nan")],
    [[float("inf")]],
    ["a"] * 300, [[1]] * 300, {"role": "user"}, [{"role": "user", "content": None}], [{"role": [], "content": {}}],
]  # fmt: skip
KEYS = ["tokens", "prompt", "messages", "stop", "n", "max_tokens", "seed", "env_id", "__class__", "", "model", "stream"]


class Route(NamedTuple):
    """A route that takes a body."""

    path: str
    template: dict[str, Any]
    """A valid body."""
    column: str
    text: str
    """Keys of a list and of a text, for `bodies`."""


class Hostile(NamedTuple):
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Target:
    """A server."""

    port: int
    routes: tuple[Route, ...]
    key: str | None
    largest: int
    """Bytes of its largest body."""


def send_all(target: Target, seed: int, count: int, threads: int) -> Counter[str]:
    """Send `count` hostile requests and count the responses by status, and those of other kinds by name."""
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(lambda part: _send_part(target, random.Random(seed + part), count // threads), range(threads))
    return sum(parts, Counter())


def _send_part(target: Target, chance: random.Random, count: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    connection = HTTPConnection("127.0.0.1", target.port, timeout=SECONDS)
    for _ in range(count):
        if chance.random() < 0.03:
            outcomes[_send_broken(target, chance)] += 1
            continue
        request = hostile(target, chance)
        try:
            connection.request(request.method, request.path, request.body, request.headers)
            response = connection.getresponse()
            response.read()
            outcomes[str(response.status)] += 1
        except TimeoutError:
            outcomes["timeout"] += 1
        except (OSError, HTTPException):
            outcomes[CLOSED] += 1
        else:
            continue
        connection.close()
    connection.close()
    return outcomes


def _send_broken(target: Target, chance: random.Random) -> str:
    """Send something that is no HTTP, or the part of a request, and hang up."""
    head = f"POST {chance.choice(target.routes).path} HTTP/1.1\r\nHost: localhost\r\n"
    texts = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200),
        b"GET / HTTP/9.9\r\n\r\n",
        chance.randbytes(500),
        f"{head}Content-Length: 999999999\r\n\r\n{{".encode(),
        f"{head}Content-Length: -5\r\n\r\n{{}}".encode(),
        f"{head}Transfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n{{".encode(),
        f"{head}X: {'a' * 70_000}\r\n\r\n".encode(),
        f"{head}Content-Length: 2\r\nContent-Length: 5\r\n\r\n{{}}".encode(),
    ]
    with suppress(OSError), socket.create_connection(("127.0.0.1", target.port), timeout=5) as connection:
        connection.sendall(chance.choice(texts))
        connection.settimeout(BROKEN_SECONDS)
        connection.recv(4096)
    return "broken off"


def hostile(target: Target, chance: random.Random) -> Hostile:
    """Return a random request, which may happen to be valid."""
    route = chance.choice(target.routes)
    method = "POST" if chance.random() < 0.97 else chance.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
    headers = {"Content-Type": "application/json", **_headers(target, chance)}
    kind = chance.random()
    if kind < 0.6:
        body = _mutated_text(route.template, chance)
    elif kind < 0.75:
        body = _cut(json.dumps(route.template).encode(), chance)
    else:
        exponent = chance.uniform(10, 23) if kind > 0.99 else chance.uniform(7, 15)
        body = _bomb(route, min(int(2**exponent), target.largest), chance)
    if chance.random() < 0.05:
        headers["Content-Encoding"] = chance.choice(["gzip", "gzip", "br", "deflate", "gzip, gzip"])
        body = gzip.compress(body, 1) if chance.random() < 0.7 else body
    return Hostile(method, route.path, headers, body)


def _headers(target: Target, chance: random.Random) -> dict[str, str]:
    headers: dict[str, str] = {}
    if target.key is not None:
        sent = chance.choice([None, "wrong", target.key, target.key])
        headers |= {} if sent is None else {"Authorization": f"Bearer {sent}"}
    odd = [
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Content-Type": "text/plain"},
        {"Expect": "1"},
    ]
    return headers | (chance.choice(odd) if chance.random() < 0.05 else {})


def _mutated_text(template: dict[str, Any], chance: random.Random) -> bytes:
    content = copy.deepcopy(template)
    for _ in range(chance.choice([1, 1, 1, 2, 3, 6])):
        holder, key = chance.choice(list(_places(content)))
        choice = chance.random()
        if choice < 0.75:
            holder[key] = copy.deepcopy(chance.choice(VALUES))
        elif choice < 0.85 and len(holder) > 1:
            del holder[key]
        elif isinstance(holder, dict):
            holder[chance.choice(KEYS)] = copy.deepcopy(chance.choice(VALUES))
        else:
            holder.insert(key, copy.deepcopy(chance.choice(VALUES)))
    return json.dumps(content).encode()


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) below `content`."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        yield content, key
        yield from islice(_places(value), 50)


def _cut(text: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(text))
    return text[:at] + chance.choice([b"", chance.randbytes(chance.randrange(1, 40)), text[at + 1 :], text * 3])


def _bomb(route: Route, size: int, chance: random.Random) -> bytes:
    found = bodies(route.column.encode(), route.text.encode(), b"", size=max(size, 100))
    return next(islice(found, chance.randrange(NUM_BOMBS), None))[1]
