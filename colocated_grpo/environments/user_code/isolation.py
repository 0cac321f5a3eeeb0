"""Isolation of third-party games within this process: suppressed output, separate random state, own log files."""

import logging
import random
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

import numpy

State = list[tuple[str, str, int, logging.Formatter | None]]
"""(logger name, path, level, formatter) of each log file."""
LOCK_TIMEOUT = 300.0
"""Maximum seconds to wait for another isolated block. A hung block would hang the run without this limit."""

_process_state_lock = threading.Lock()
"""Standard output and the global random streams belong to the process, so only one call may replace them at a time."""
_inside = threading.local()
"""`silent` is True in the thread that is in an isolated block."""


class _SilentHere:
    """A stream that drops writes of the thread in an isolated block, and forwards the writes of all other threads."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if getattr(_inside, "silent", False) else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _from_elsewhere(_record: logging.LogRecord) -> bool:
    return not getattr(_inside, "silent", False)


@contextmanager
def isolated(rng: random.Random) -> Generator[None]:
    """Suppress the thread's output and its log records on the console, and give `random` the state of `rng`.

    numpy is seeded from `rng`, which advances with the block. Raises RuntimeError if another block lasts too long.
    """
    if not _process_state_lock.acquire(timeout=LOCK_TIMEOUT):
        raise RuntimeError(f"another game call has not returned for {LOCK_TIMEOUT:g} s")
    try:
        with redirect_stdout(_SilentHere(sys.stdout)), redirect_stderr(_SilentHere(sys.stderr)):
            for handler in logging.getLogger().handlers:
                if not isinstance(handler, logging.FileHandler):
                    handler.addFilter(_from_elsewhere)  # once; its stream was opened before the block
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
    finally:
        _process_state_lock.release()


class OwnLogs:
    """The log files of one game object. Only calls inside `attached` write to these files.

    Loggers are global by name: records of every copy and table would go into the files of all games. Of several files
    of one name at a logger, the last is kept: short-lived games must not exhaust the process's descriptors.
    """

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], logging.FileHandler] = {}

    @contextmanager
    def attached(self) -> Generator[None]:
        """Attach the files. On exit, detach them and all handlers that the block has added.

        Added file handlers are kept for the next call, others are closed. Not thread-safe: use inside `isolated`.
        """
        before = {id(handler) for logger in _loggers() for handler in logger.handlers}
        for (name, _), handler in self._files.items():
            logging.getLogger(name).addHandler(handler)
        try:
            yield
        finally:
            for logger in _loggers():
                for handler in [each for each in logger.handlers if id(each) not in before]:
                    logger.removeHandler(handler)
                    self._keep(logger.name, handler)

    def _keep(self, name: str, handler: logging.Handler) -> None:
        if not isinstance(handler, logging.FileHandler):
            handler.close()
            return
        key = (name, Path(handler.baseFilename).name)
        if (former := self._files.get(key, handler)) is not handler:
            former.close()
        self._files[key] = handler

    def close(self) -> None:
        for handler in self._files.values():
            handler.close()
        self._files.clear()

    def __getstate__(self) -> State:
        return [(name, file.baseFilename, file.level, file.formatter) for (name, _), file in self._files.items()]

    def __setstate__(self, state: State) -> None:
        self._files = {}
        for name, path, level, formatter in state:
            handler = logging.FileHandler(path, encoding="utf-8", delay=True)  # opened by the first record
            handler.setLevel(level)
            handler.setFormatter(formatter)
            self._files[name, Path(path).name] = handler


def _loggers() -> list[logging.Logger]:
    named = logging.root.manager.loggerDict.values()
    return [logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))]
