"""Isolation of third-party games within this process: suppressed output and separate random state."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import numpy

LOCK_TIMEOUT = 300.0
"""Seconds to wait for another call. A hung call cannot be stopped; without a limit it would hang the run."""

_process_state_lock = threading.Lock()
"""Standard output and the global random streams belong to the process, so only one call may replace them at a time."""


@contextmanager
def isolated(rng: random.Random) -> Iterator[None]:
    """Suppress printing, and make `rng` the state of the module `random`; numpy's global stream is seeded from it.

    `rng` advances by what the block draws. Raises RuntimeError after LOCK_TIMEOUT if another block does not end.
    """
    with _exclusive(), redirect_stdout(io.StringIO()):
        before, numpy_before = random.getstate(), numpy.random.get_state()
        numpy.random.seed(rng.getrandbits(32))
        random.setstate(rng.getstate())
        try:
            yield
        finally:
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
