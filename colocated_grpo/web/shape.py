"""Bounds on the structure of JSON text, checked on its bytes before it is parsed.

Parsed JSON can take thirty times the memory of its text: `[],` is three bytes of text and a 56-byte object.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

CHUNK_BYTES = 1 << 18
"""Size of a chunk of text. Small, to limit memory and the time for which other threads are blocked."""
NO_BACKSLASH = re.compile(rb"[^\\]")
NEITHER_BRACKETS_NOR_COMMAS = bytes(byte for byte in range(256) if byte not in b"[]{},")
STEPS = np.zeros(256, dtype=np.int8)
"""Change of depth at each byte."""
STEPS[[ord("["), ord("{")]] = 1
STEPS[[ord("]"), ord("}")]] = -1


class TooComplex(Exception):
    """The text exceeds a bound, given in the message."""


@dataclass(frozen=True, kw_only=True)
class BodyShape:
    """Maximum structure of a JSON text. Brackets and commas in strings do not count."""

    values: int
    """All entries of lists and objects, and the lists and objects themselves."""
    containers: int
    """Lists and objects."""
    strings: int
    """Strings, including keys."""
    depth: int

    def check(self, text: bytes) -> None:
        """Raise TooComplex above a bound, in time linear in the length. The text need not be valid JSON."""
        # Counts over the whole text are upper bounds, which are sufficient for most texts.
        opened = text.count(b"[") + text.count(b"{")
        if (
            opened <= min(self.depth, self.containers)
            and text.count(b'"') // 2 <= self.strings
            and text.count(b",") + opened <= self.values
        ):
            return
        quotes = values = containers = depth = 0
        for chunk in _without_escapes(text):
            structure = _outside_strings(chunk, inside=quotes % 2 == 1)
            quotes += chunk.count(b'"')
            steps = STEPS[np.frombuffer(structure, dtype=np.uint8)]
            depths = np.cumsum(steps, dtype=np.int64)
            values += len(structure) - int(np.count_nonzero(steps < 0))
            containers += int(np.count_nonzero(steps > 0))
            deepest = depth + int(depths.max(initial=0))
            depth += int(depths[-1]) if len(depths) else 0
            for count, bound, name in (
                (values, self.values, "values"),
                (containers, self.containers, "lists and objects"),
                (quotes // 2, self.strings, "strings"),
                (deepest, self.depth, "levels of nesting"),
            ):
                if count > bound:
                    raise TooComplex(f"more than {bound} {name}")


def _without_escapes(text: bytes) -> Iterator[bytes]:
    r"""Yield the text in chunks, with \\ and \" blanked out: every remaining quote begins or ends a string."""
    start = 0
    while start < len(text):
        # A chunk ends after a byte other than a backslash, so no escape spans two chunks.
        end = NO_BACKSLASH.search(text, start + CHUNK_BYTES - 1)
        chunk = text[start : end.end() if end else len(text)]
        start += len(chunk)
        yield chunk.replace(rb"\\", b"  ").replace(rb"\"", b"  ") if b"\\" in chunk else chunk


def _outside_strings(chunk: bytes, *, inside: bool) -> bytes:
    """Return the brackets and commas of a chunk that are outside strings. inside: True if the chunk begins in a
    string."""
    outside = chunk.split(b'"')[inside::2] if b'"' in chunk else [] if inside else [chunk]
    return b"".join(outside).translate(None, NEITHER_BRACKETS_NOR_COMMAS)
