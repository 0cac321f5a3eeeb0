"""Request bodies of 32 MB that are cheap to send and were, or could be, dear to check, and what one costs a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import psutil

SIZE = 32 << 20
HEALTH_SECONDS = 0.01
MIB = 1 << 20


def different_keys(size: int) -> bytes:
    return b"{" + b"".join(b'"%07x":0,' % number for number in range(size // 12 - 1)) + b'"a":0}'


def bodies(column: bytes, text: bytes, head: bytes, size: int = SIZE) -> Iterator[tuple[str, bytes]]:
    """Yield names and bodies. column, text: keys of a list and of a text. head: other keys that are needed."""

    def filled(start: bytes, unit: bytes, end: bytes) -> bytes:
        return start + unit * ((size - len(start) - len(end)) // len(unit)) + end

    lists, string = b"{" + head + b'"' + column + b'": ', b"{" + head + b'"' + text + b'": "'
    yield "empty lists", filled(lists + b"[", b"[],", b"[]]}")
    yield "lists of one number", filled(lists + b"[", b"[1],", b"[1]]}")
    yield "numbers", filled(lists + b"[[", b"1,", b"1]]}")
    yield "floats", filled(lists + b"[[", b"0.12345678901234567,", b"1]]}")
    yield "one number", filled(lists + b"[[", b"9", b"]]}")
    yield "deep lists", filled(lists, b"[", b"")
    yield "short texts", filled(lists + b"[", b'"a",', b'"a"]}')
    yield "empty objects", filled(lists + b"[", b"{},", b"{}]}")
    yield "different keys", different_keys(size)
    yield "one emoji", filled(string + "\U0001f600".encode(), b"a", b'"}')
    yield "escaped emoji", filled(string, b"\\ud83d\\ude00", b'"}')
    yield "escaped quotes", filled(string, b'\\"', b'"}')
    yield "backslashes", filled(string + b"\\ud83d\\ude00", b"\\\\", b'"}')
    yield "spaces", filled(lists, b" ", b"[]}")
    yield "not UTF-8", filled(string, b"a", b'\xff"}')


@dataclass
class Cost:
    """Cost of a request to its server, and how late the slowest other response was."""

    status: int
    cpu_seconds: float
    mib: float
    """Peak memory above that before the request."""
    health_seconds: float


def cost_of(pid: int, port: int, path: str, health: str, body: bytes, **headers: str) -> Cost:
    """Post a body to the server with this process id."""
    process = psutil.Process(pid)
    _reset_peak(pid)
    before, used = process.memory_info().rss, sum(process.cpu_times()[:2])
    with _watched(port, health) as late:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        status = connection.getresponse().status
        connection.close()
    return Cost(status, sum(process.cpu_times()[:2]) - used, (_peak(pid) - before) / MIB, max(late))


@contextmanager
def _watched(port: int, path: str) -> Iterator[list[float]]:
    """Request `path` in a loop on another thread and collect the response times."""
    late, done = [0.0], threading.Event()

    def watch() -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        while not done.wait(HEALTH_SECONDS):
            start = time.monotonic()
            connection.request("GET", path)
            connection.getresponse().read()
            late.append(time.monotonic() - start)
        connection.close()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield late
    finally:
        done.set()
        thread.join()


def _reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peak(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
