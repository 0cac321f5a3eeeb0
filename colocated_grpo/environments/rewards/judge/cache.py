"""Scores by the content of their request, in memory and optionally in a file."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from contextlib import suppress
from hashlib import sha256
from pathlib import Path


def request_key(url: str, body: object) -> str:
    """Return a digest of everything that decides the answer."""
    return sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()


class ScoreCache:
    """The `size` scores that were used last. A file keeps all of them, one JSON line each."""

    def __init__(self, size: int, file: Path | None) -> None:
        """file: appended to, and read first if it exists. Several processes may use it. Raises OSError."""
        self._size = size
        self._file = file
        self._scores: OrderedDict[str, float] = OrderedDict()
        if file is not None:
            self._append(b"")  # a file that cannot be written is found at the start
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError, TypeError):  # a line that a killed process has left unfinished
                    key, score = json.loads(line)
                    self._remember(str(key), float(score))

    def get(self, key: str) -> float | None:
        if key in self._scores:
            self._scores.move_to_end(key)
        return self._scores.get(key)

    def put(self, key: str, score: float) -> None:
        self._remember(key, score)
        if self._file is not None:
            self._append((json.dumps([key, score]) + "\n").encode())

    def _remember(self, key: str, score: float) -> None:
        self._scores[key] = score
        self._scores.move_to_end(key)
        if len(self._scores) > self._size:
            self._scores.popitem(last=False)

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        # One write to a file opened for appending, so that lines of several processes do not mix.
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
