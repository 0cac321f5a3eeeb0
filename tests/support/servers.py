"""HTTP servers in processes of their own, for tests that talk to them and kill them."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.support.paths import ROOT

START_SECONDS = 60.0
HAS_ATROPOS = importlib.util.find_spec("atroposlib") is not None
EMBEDDED = [sys.executable, "-m", "colocated_grpo.atropos.api"]
UPSTREAM = [sys.executable, "-c", "from atroposlib.cli.run_api import main; main()"]
needs_atropos = pytest.mark.skipif(not HAS_ATROPOS, reason="atroposlib is not installed")
APIS = [pytest.param(EMBEDDED, id="embedded"), pytest.param(UPSTREAM, id="atroposlib", marks=needs_atropos)]


def until(happened: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class ApiProcess:
    """An API server at a port of its own. A context: on exit it is gone."""

    def __init__(self, command: Sequence[str], port: int | None = None) -> None:
        self.command = list(command)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Also again after `kill`, at the same port; returns once it answers."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [*self.command, "--host", "127.0.0.1", "--port", str(self.port)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self.process.poll() is None, f"{self.command} ended with {self.process.returncode}"
            assert time.monotonic() < deadline, f"{self.command} does not answer"
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/info", timeout=1):
                return True
        except (URLError, ConnectionError, TimeoutError):
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ApiProcess:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()
