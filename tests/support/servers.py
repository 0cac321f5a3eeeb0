"""Atropos API servers in processes of their own, which tests call and kill."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from colocated_grpo.servers.engine_servers import free_ports
from tests.support.paths import ROOT

START_SECONDS = 120.0
HAS_ATROPOS = importlib.util.find_spec("atroposlib") is not None
EMBEDDED = [sys.executable, "-m", "colocated_grpo.atropos.api"]
UPSTREAM = [sys.executable, "-c", "from atroposlib.cli.run_api import main; main()"]
needs_atropos = pytest.mark.skipif(not HAS_ATROPOS, reason="atroposlib is not installed")
APIS = [pytest.param(EMBEDDED, id="embedded"), pytest.param(UPSTREAM, id="atroposlib", marks=needs_atropos)]


def until(happened: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until `happened()` is true, through the work of another thread or process."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"not true within {seconds:g} s"
        time.sleep(0.002)


def free_port() -> int:
    """Return a port that no connection takes by itself before it is used: those are above 32767."""
    return free_ports(1)[0]


class ApiProcess:
    """An API server on a port of its own, killed on exit from the context."""

    def __init__(self, command: Sequence[str], port: int | None = None, log: Path = Path(os.devnull)) -> None:
        """log: file of its stderr."""
        self.command = list(command)
        self._log = log
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start the process and wait until it responds. Also restarts it after `kill`, on the same port."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [*self.command, "--host", "127.0.0.1", "--port", str(self.port)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._responds():
            assert self.process.poll() is None, f"{self.command} exited with {self.process.returncode}"
            assert time.monotonic() < deadline, f"{self.command} does not respond"
            time.sleep(0.02)

    def _responds(self) -> bool:
        try:
            with urlopen(f"{self.url}/info", timeout=1):
                return True
        except HTTPError:
            return True  # it requires a key
        except (URLError, ConnectionError, TimeoutError):
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ApiProcess:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()
