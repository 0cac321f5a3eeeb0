"""The processes that run programs. `runner` is what they execute."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import IO, Any

from colocated_grpo.environments.rewards.scoring import NoReward

RUNNER = Path(__file__).with_name("runner.py")
GRACE = 10.0
"""Seconds for a process to start and to end its tests, beside the time limit of the tests."""


class Runners:
    """Processes that are kept between calls, at most as many as calls ran at a time."""

    def __init__(self) -> None:
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()

    def passed(self, job: Mapping[str, Any], seconds: float) -> int:
        """Return the number of passed tests. Raises NoReward if the process ends or does not answer.

        The working folder of the tests is empty, and is removed afterwards.
        """
        try:
            process = self._idle.get_nowait()
        except Empty:
            process = _start()
        with TemporaryDirectory(prefix="run_code_", ignore_cleanup_errors=True) as folder:
            answer = _ask(process, {**job, "folder": folder}, seconds + GRACE)
        if answer:
            self._idle.put(process)
            return int(answer)
        raise NoReward(f"the process that runs the tests {_end(process)}")


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        # -I: neither the environment nor the working folder changes what a program imports.
        [sys.executable, "-I", str(RUNNER)],
        # Without the variables of this process, among which are API keys.
        env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C must reach the trainer only; and it makes a group that one kill ends
    )


def _ask(process: subprocess.Popen[str], job: Mapping[str, Any], seconds: float) -> str:
    """Return the line that answers a job; '' if there is none in time."""
    stdin, stdout = _pipes(process)
    try:
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
    except BrokenPipeError:
        return ""
    ready, _, _ = select.select([stdout], [], [], seconds)
    return stdout.readline() if ready else ""


def _end(process: subprocess.Popen[str]) -> str:
    """Kill the process and its tests. Return how it has ended."""
    code = process.poll()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in _pipes(process):
        with suppress(BrokenPipeError):  # closing flushes, and the process is dead
            pipe.close()
    return "does not answer" if code is None else f"has ended with exit code {code}"


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None and process.stdout is not None  # _start() opens both
    return process.stdin, process.stdout
