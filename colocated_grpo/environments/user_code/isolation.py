"""Other people's games in this process: quiet, and with a chance of their own."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import numpy

_alone = threading.Lock()
"""Standard output and the global streams of chance belong to the process: one call at a time."""
PATIENCE = 300.0
"""Seconds after which the call before this one counts as hanging. It cannot be ended, and the run would stand still."""


@contextmanager
def isolated(chance: random.Random) -> Iterator[None]:
    """Nothing printed. The module `random` is `chance`, which moves on; numpy's global stream follows from it.

    Raises RuntimeError where another call hangs.
    """
    with _exclusive(), redirect_stdout(io.StringIO()):
        before, numpy_before = random.getstate(), numpy.random.get_state()
        numpy.random.seed(chance.getrandbits(32))
        random.setstate(chance.getstate())
        try:
            yield
        finally:
            chance.setstate(random.getstate())
            random.setstate(before)
            numpy.random.set_state(numpy_before)


@contextmanager
def _exclusive() -> Iterator[None]:
    if not _alone.acquire(timeout=PATIENCE):
        raise RuntimeError(f"another call of a game has not come back for {PATIENCE:g} s")
    try:
        yield
    finally:
        _alone.release()
