"""The file through which an engine process tells its parent what to start again."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from colocated_grpo.servers.options import ServeOptions

STATE_VARIABLE = "COLOCATED_GRPO_SERVE_STATE"
"""Environment variable with the path of the file. It exists once the engine has been ready."""
RESTART = 75
"""Exit code of an engine process that is to be started again (EX_TEMPFAIL)."""


def resumed(options: ServeOptions) -> ServeOptions:
    """Return the options with the port and the model of the process before, if there was one."""
    file = _file()
    if file is None or not file.exists():
        return options
    return replace(options, **json.loads(file.read_text(encoding="utf-8")))


def _write(model: str, port: int) -> None:
    file = _file()
    if file is not None:
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({"model": model, "port": port}), encoding="utf-8")
        partial.replace(file)


class Restart:
    """A request to start the engine again with another model, on the same port."""

    def __init__(self) -> None:
        self.requested = False
        self._port = 0

    def ready(self, model: str, port: int) -> None:
        """Record model and port, with which the engine is started again after a crash."""
        self._port = port
        _write(model, port)

    def request(self, model: str) -> None:
        """End this process, to be started again with `model`."""
        _write(model, self._port)
        self.requested = True


def _file() -> Path | None:
    path = os.environ.get(STATE_VARIABLE)
    return None if path is None else Path(path)
