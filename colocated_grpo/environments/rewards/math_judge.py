"""math-verify in child processes.

Answers such as 9^9^9 keep math-verify busy indefinitely. Its own time limit works only in the main thread, and one long
operation holds the GIL, so in this process a single answer could freeze the engine. A child process can be killed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

SECONDS = 5.0
"""Time limit of one comparison, import of the package excluded."""
WORKER = Path(__file__).with_name("math_worker.py")

_idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
"""Idle children, at most as many as the peak number of concurrent comparisons."""


def equal_math(gold: str, answer: str) -> bool | None:
    """Return whether the results are equal; False after SECONDS; None if `gold` contains nothing to compare."""
    try:
        child = _idle.get_nowait()
    except Empty:
        child = _start()
    stdin, stdout = _pipes(child)
    try:
        stdin.write(json.dumps([gold, answer]) + "\n")
        stdin.flush()
        response = stdout.readline()
    except BrokenPipeError:
        response = ""
    if response:
        _idle.put(child)
        return json.loads(response)
    return _verdict_of_exit(child)


def _start() -> subprocess.Popen[str]:
    if find_spec("math_verify") is None:
        raise ModuleNotFoundError("math-verify is not installed; install it with: pip install math-verify")
    # -P: the folder of this file must not shadow installed packages. New session: Ctrl-C must reach the trainer only.
    command = [sys.executable, "-P", str(WORKER), str(SECONDS)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )


def _pipes(child: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert child.stdin is not None and child.stdout is not None  # _start() opens both
    return child.stdin, child.stdout


def _verdict_of_exit(child: subprocess.Popen[str]) -> bool:
    """Return False if the child was killed at its time limit. Raises for any other exit."""
    for pipe in _pipes(child):
        with suppress(BrokenPipeError):  # closing flushes, and the child may be dead
            pipe.close()
    code = child.wait()
    if code == -signal.SIGALRM:
        return False
    raise RuntimeError(f"the math-verify process exited with code {code}")
