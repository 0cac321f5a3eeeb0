"""`python -m colocated_grpo.servers` as a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

from tests.support.paths import ROOT

START_SECONDS = 300.0
MAX_TOKENS = 64


class ServeProcess:
    """`python -m colocated_grpo.servers` on a free port, killed on exit from the context."""

    def __init__(
        self, model: Path, *flags: str, environment: dict[str, str] | None = None, log: Path | None = None
    ) -> None:
        """log: file of its stderr."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "colocated_grpo.servers", str(model), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--max-model-len", str(MAX_TOKENS), *flags],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if log is None else log.open("a"),
            text=True,
        )
        self.printed: list[str] = []
        """Lines after the one with the address."""

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(self, *_error: object) -> None:
        everyone = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.kill()
        self.process.communicate()
        for process in everyone:  # they end by themselves, but a test should leave nothing when it ends
            with suppress(psutil.NoSuchProcess):
                process.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def engine(self) -> psutil.Process:
        """Return the process of the engine's first rank."""
        return psutil.Process(self.call("GET", "/bridge/info")[1]["pid"])

    def wait_until_ready(self) -> None:
        timer = threading.Timer(START_SECONDS, self.process.kill)
        timer.daemon = True
        timer.start()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r" at http://127\.0\.0\.1:(\d+)$", line.rstrip()):
                self.port = int(found[1])
                timer.cancel()
                threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()
                return
        raise AssertionError(f"the server has not started:\n{self.process.communicate()[1]}")

    def _read(self, lines: Iterable[str]) -> None:
        """Keep what the server prints: a full pipe would block it."""
        for line in lines:
            self.printed.append(line.rstrip())

    def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=START_SECONDS)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text) if text else None

    def done(self, path: str, body: Any = None) -> Any:
        status, response = self.call("POST", path, body)
        assert status == 200, response
        return response
