"""Importing slow libraries in a new process. Standard library only."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Import without garbage collection, and exclude all objects so far from it: modules are never freed.

    Otherwise each of many collections would look at all of them again.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
