"""The rank's side of guard_process: signs of life, and which code may block the rank."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from colocated_grpo.runtime import guard_process
from colocated_grpo.runtime.blocking_code import LIBRARIES, PACKAGE
from colocated_grpo.runtime.verdict import VERDICT_VARIABLE

ALIVE_SECONDS = 0.5
MIN_SECONDS = 5.0
"""Lower bound of the limit: the compilation of a kernel may also hold the interpreter lock for seconds."""
STOP_SECONDS = 5.0
"""Limit after a stop request."""
EXIT_SECONDS = 5.0


class RankGuard:
    """Starts the guard process of this rank. Create it in the main thread, after the handlers of the stop signals."""

    def __init__(self, seconds: float, setting: str) -> None:
        """seconds: longest time in which user code inside `armed()` may keep all other threads from running."""
        reader, self._writer = os.pipe()
        dumps, self._dumps = os.pipe()
        os.set_blocking(self._writer, False)
        self._lock = threading.Lock()
        self._running = 0
        self._done = threading.Event()
        options = guard_process.Options(
            rank=os.environ["RANK"],
            pid=os.getpid(),
            setting=setting,
            seconds=max(seconds, MIN_SECONDS),
            stop_seconds=STOP_SECONDS,
            dumps=dumps,
            verdict=os.environ.get(VERDICT_VARIABLE),
            foreign=[*LIBRARIES, PACKAGE],
            package=PACKAGE,
            agent=os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None,
        )
        faulthandler.register(guard_process.DUMP_SIGNAL, file=self._dumps, all_threads=False)
        self._process = _start(options, reader)
        for descriptor in (reader, dumps):
            os.close(descriptor)
        # The C-level handler writes the number of the signal at once. Python's own handler waits for the lock.
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_wakeup)
        threading.Thread(target=self._signal_life, name="signs of life", daemon=True).start()

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Context of user code that must not hold the interpreter lock for long, for any number of threads."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def close(self) -> None:
        """End the guard process.

        The handler of DUMP_SIGNAL stays, with its pipe: the signal may still arrive, and would end this process.
        """
        self._done.set()
        signal.set_wakeup_fd(self._wakeup_before)
        with self._lock:
            os.close(self._writer)
            self._writer = -1
        self._process.wait(EXIT_SECONDS)

    def _count(self, change: int) -> None:
        with self._lock:
            before, self._running = self._running, self._running + change
            if not before or not self._running:
                self._write(guard_process.ARMED if self._running else guard_process.DISARMED)

    def _signal_life(self) -> None:
        while not self._done.wait(ALIVE_SECONDS):
            with self._lock:
                self._write(guard_process.ALIVE)

    def _write(self, message: int) -> None:
        with suppress(OSError):  # the guard process was killed
            os.write(self._writer, bytes([message]))


def _start(options: guard_process.Options, reader: int) -> subprocess.Popen[bytes]:
    # Isolated and without site: it starts in 20 ms and shares nothing with the rank that could fail.
    command = [sys.executable, "-I", "-S", str(Path(guard_process.__file__)), json.dumps(options._asdict())]
    path = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return subprocess.Popen(
        command,
        stdin=reader,
        stdout=subprocess.DEVNULL,
        pass_fds=[options.dumps],
        env=path,
        start_new_session=True,  # Ctrl-C in a terminal must not reach it
    )


def _forget_wakeup() -> None:
    """In a forked child: its signals are not the rank's."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
