"""math-verify in child processes.

Answers such as 9^9^9 keep it busy for ever. Its own time limit needs the main thread, and a long operation inside the
interpreter holds the GIL: in this process one answer could freeze the engine. A child can simply be ended.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue

SECONDS = 5.0
"""Time for one comparison, loading of the package aside."""
WORKER = Path(__file__).with_name("math_worker.py")

_idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
"""Children that wait for work; there are never more than threads that ask at once."""


def equal_math(gold: str, answer: str) -> bool | None:
    """Whether the results are equal; False also when that took too long; None: nothing to compare in `gold`."""
    try:
        child = _idle.get_nowait()
    except Empty:
        child = _start()
    try:
        child.stdin.write(json.dumps([gold, answer]) + "\n")
        child.stdin.flush()
        reply = child.stdout.readline()
    except BrokenPipeError:
        reply = ""
    if reply:
        _idle.put(child)
        return json.loads(reply)
    return _ended(child)


def _start() -> subprocess.Popen[str]:
    if find_spec("math_verify") is None:
        raise ModuleNotFoundError("math-verify is not installed; install it with: pip install math-verify")
    # -P: the folder of this file must not shadow installed packages. Own session: Ctrl-C is the trainer's to handle.
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


def _ended(child: subprocess.Popen[str]) -> bool:
    child.stdout.close()
    child.stdin.close()
    code = child.wait()
    if code == -signal.SIGALRM:
        return False
    raise RuntimeError(f"the math-verify process ended with exit code {code}")
