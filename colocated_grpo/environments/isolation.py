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


@contextmanager
def isolated(chance: random.Random) -> Iterator[None]:
    """Nothing printed. The module `random` is `chance`, which moves on; numpy's global stream follows from it."""
    with _alone, redirect_stdout(io.StringIO()):
        before, numpy_before = random.getstate(), numpy.random.get_state()
        numpy.random.seed(chance.getrandbits(32))
        random.setstate(chance.getstate())
        try:
            yield
        finally:
            chance.setstate(random.getstate())
            random.setstate(before)
            numpy.random.set_state(numpy_before)
