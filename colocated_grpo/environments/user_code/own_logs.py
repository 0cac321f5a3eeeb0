"""Log files of third-party games that install handlers on loggers of the whole process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

State = list[tuple[str, str, int, Any]]
"""Logger's name, path, level and formatter of each file."""


class OwnLogs:
    """The log files of one game object, written only by calls inside `attached`.

    Loggers are found by name, so without this the records of every copy, table and process part would go into the files
    of all games. Of several files with the same name on the same logger, the one added last is kept: a record is then
    in one file, and games that come and go do not use up the process's file descriptors.
    """

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], logging.FileHandler] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the files, and afterwards detach them and whatever handlers the block has added.

        Added handlers that are not files print to the console, and are dropped. Not thread-safe: use inside `isolated`.
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
        former = self._files.get(key, handler)
        if former is not handler:
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
