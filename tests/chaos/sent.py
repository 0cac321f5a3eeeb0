"""Requests as plain data that is printed and sent again: JSON of any size, framing, timing and end of a connection."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

MIB = 1 << 20
LARGEST = 32 * MIB
"""Bytes of a repeated text."""
RESPONSE_SECONDS = 15.0
UNFINISHED_SECONDS = 0.05
"""How long to wait for a response to something that is no whole request."""
SILENT = "silent"
"""Outcome of a request without a response."""
HEADERS = (("Host", "localhost"), ("Content-Type", "application/json"))
Json = Any
"""What `json.dumps` takes, with `Repeated` anywhere inside and `Again` among the keys of objects."""


@dataclass(frozen=True)
class Repeated:
    """JSON text, valid or not: `start`, then `unit` `count` times, then `end`. A # in the unit is its number."""

    start: str
    unit: str
    count: int
    end: str

    def text(self) -> str:
        numbered = "#" in self.unit
        count = min(self.count, LARGEST // (len(self.unit.encode()) + 7 * numbered))
        if numbered:
            middle = "".join(self.unit.replace("#", str(number)) for number in range(count))
        else:
            middle = self.unit * count
        return f"{self.start}{middle}{self.end}"


@dataclass(frozen=True)
class Again:
    """The name of a field that a JSON object already has."""

    name: str


def text_of(value: Json) -> str:
    """Return JSON text. Numbers and strings that JSON does not have come from `Repeated`, NaN and Infinity too."""
    match value:
        case Repeated():
            return value.text()
        case dict():
            names = (json.dumps(key.name if isinstance(key, Again) else key) for key in value)
            return "{" + ",".join(map(":".join, zip(names, map(text_of, value.values()), strict=True))) + "}"
        case list():
            return "[" + ",".join(map(text_of, value)) + "]"
        case _:
            return json.dumps(value)


@dataclass(frozen=True)
class Sent:
    """One request on a connection of its own: its bytes, and how they are sent."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = HEADERS
    has_key: bool = True
    """With the key of the server, if it needs one."""
    body: Json = None
    """Bytes are sent as they are; None for none."""
    framing: str = "length"
    """`length`, `chunked`, or another value that does not fit the body."""
    gzipped: bool = False
    share: float = 1.0
    """Of the bytes, that are sent."""
    pauses: tuple[float, ...] = ()
    """Seconds before each of equal parts but the first."""
    ending: str = "read"
    """`read` the response, close the connection before it, `reset` it, `half` (close the sending side), or `hold` it
    open beside the next cases."""

    @property
    def is_whole(self) -> bool:
        """True if the server must respond."""
        return self.share == 1 and self.framing in ("length", "chunked") and self.ending in ("read", "half")

    def data(self, prefix: str, headers: Mapping[str, str]) -> bytes:
        """Return the bytes that are sent. prefix: of the path. headers: further ones, of a client with `has_key`."""
        body = b"" if self.body is None else self.body if isinstance(self.body, bytes) else encoded(self.body)
        body = gzip.compress(body, 1) if self.gzipped else body
        lines = [f"{self.method} {prefix}{self.target} HTTP/1.1"]
        keys = headers.items() if self.has_key else ()
        lines += [f"{name}: {value}" for name, value in (*self.headers, *keys)]
        lines += ["Content-Encoding: gzip"] if self.gzipped else []
        chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        match self.framing:
            case "length":
                lines.append(f"Content-Length: {len(body)}")
            case "chunked":
                lines, body = [*lines, "Transfer-Encoding: chunked"], chunked
            case "both":
                lines += ["Transfer-Encoding: chunked", f"Content-Length: {len(body)}"]
                body = chunked
            case other:
                lines += [f"Content-Length: {length}" for length in other.split()]
        whole = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body
        return whole[: int(self.share * len(whole))]

    def send(self, port: int, prefix: str, headers: Mapping[str, str]) -> socket.socket:
        """Send the request, as far as the server reads it, and return its connection."""
        connection = socket.create_connection(("127.0.0.1", port), timeout=RESPONSE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = self.data(prefix, headers)
        step = len(data) // (len(self.pauses) + 1) + 1
        with suppress(OSError):  # the server has responded or closed before the end
            for start, pause in zip(range(0, len(data), step), (0.0, *self.pauses), strict=False):
                time.sleep(pause)
                connection.sendall(data[start : start + step])
            if self.ending == "half":
                connection.shutdown(socket.SHUT_WR)
        return connection

    def outcome(self, connection: socket.socket) -> str:
        """Close the connection as planned. Return the status of the response, or how the connection ended."""
        if self.ending == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self.ending in ("close", "reset"):
            connection.close()
            return self.ending
        connection.settimeout(RESPONSE_SECONDS if self.is_whole else UNFINISHED_SECONDS)
        response = HTTPResponse(connection, method=self.method)
        try:
            response.begin()
            response.read1()
            return str(response.status)
        except TimeoutError:
            return SILENT
        except (OSError, HTTPException):
            return "closed"
        finally:
            response.close()
            connection.close()


def encoded(body: Json) -> bytes:
    return text_of(body).encode("utf-8", "surrogatepass")


def call(
    port: int,
    method: str,
    path: str,
    body: Json = None,
    headers: Mapping[str, str] | None = None,
    seconds: float = RESPONSE_SECONDS,
) -> tuple[int | str, Any]:
    """Return the status and the parsed body of a response, or the error and None."""
    connection = HTTPConnection("127.0.0.1", port, timeout=seconds)
    sent = {"Content-Type": "application/json", **(headers or {})}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None
    except (OSError, HTTPException) as error:
        return repr(error), None
    finally:
        connection.close()
