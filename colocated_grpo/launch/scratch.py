"""The temporary folder of a launcher. Each start removes those of launchers that were killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "colocated-grpo-"
LOCK_FILE = "launcher.lock"
"""Locked while the launcher lives; the system releases the lock however it ends. Process ids would not do: containers
that share a temporary folder have different ones."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield an empty temporary folder, but for its lock; remove it at the end, and those of killed launchers now."""
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        new = Path(name) / f"{LOCK_FILE}.new"
        with new.open("w") as lock:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(new.with_name(LOCK_FILE))  # locked before another start can find it
            yield Path(name)


def _remove_abandoned() -> None:
    """Remove this user's folders whose lock is free. Folders without a lock belong to something else."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # removed by another start in the meantime, or still locked
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            # Not created: the lock must be a launcher's. Opened for writing, which network file systems require.
            descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)
