"""Isolation of third-party games within this process: suppressed output and separate random state."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

import numpy

LOCK_TIMEOUT = 300.0
"""Seconds to wait for another call. A hung call cannot be stopped; without a limit it would hang the run."""

_process_state_lock = threading.Lock()
"""Standard output and the global random streams belong to the process, so only one call may replace them at a time."""
_inside = threading.local()
"""`silent` is True in the thread that is in an isolated block."""


class _SilentHere:
    """A stream that drops what the thread in an isolated block writes, and passes on what other threads write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if getattr(_inside, "silent", False) else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _silent(stream: TextIO) -> TextIO:
    return cast(TextIO, _SilentHere(stream))


@contextmanager
def isolated(rng: random.Random) -> Iterator[None]:
    """Suppress printing to both streams, and make `rng` the state of `random`; numpy's global stream is seeded from it.

    `rng` advances by what the block draws. Raises RuntimeError after LOCK_TIMEOUT if another block does not end.
    """
    with _exclusive(), redirect_stdout(_silent(sys.stdout)), redirect_stderr(_silent(sys.stderr)):
        before, numpy_before = random.getstate(), numpy.random.get_state()
        numpy.random.seed(rng.getrandbits(32))
        random.setstate(rng.getstate())
        _inside.silent = True
        try:
            yield
        finally:
            _inside.silent = False
            rng.setstate(random.getstate())
            random.setstate(before)
            numpy.random.set_state(numpy_before)


@contextmanager
def _exclusive() -> Iterator[None]:
    if not _process_state_lock.acquire(timeout=LOCK_TIMEOUT):
        raise RuntimeError(f"another game call has not returned for {LOCK_TIMEOUT:g} s")
    try:
        yield
    finally:
        _process_state_lock.release()
