"""Running one command whose processes must all be gone afterwards, and stopping it politely first."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from colocated_grpo.runtime.signals import stop_signals

REAP_SECONDS = 10.0
SAME_REQUEST_SECONDS = 1.0
"""A signal that comes again so soon is the same request: a terminal and a wrapper may both pass it on."""
# Linux <sys/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STOPPING = b"\nstopping: the run ends where nothing is lost; Ctrl-C again, or SIGTERM, kills it at once\n"


def run_command(command: Sequence[str], env: Mapping[str, str], redirect: Path | None = None) -> int:
    """Run to the end and return the exit code; 128 + n when ended by signal n. Call from the main thread.

    The first stop signal reaches, as SIGTERM, the children of the command: under torchrun these are the ranks, which
    may take as long as they need to save, while torchrun itself would kill them after 30 seconds. A second SIGINT or
    SIGTERM kills everything. When this returns, no process that the command has started is alive.
    """
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    _adopt_orphans()
    with _output(redirect) as output, _StopSignals(others) as stop:
        try:
            process = subprocess.Popen(
                command,
                env=dict(env),
                stdout=output,
                stderr=output,
                start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which passes it on once
                preexec_fn=_end_with_parent(),
            )
            stop.watch(process)
            code = process.wait()
        finally:
            kill_descendants(spare=others)
    if stop.received:
        return 128 + stop.received[0]
    return code if code >= 0 else 128 - code


class _StopSignals:
    """While entered: turns signals into a polite stop, then into an impolite one."""

    def __init__(self, spare: set[int]) -> None:
        self.received: list[int] = []
        self._spare = spare
        self._process: subprocess.Popen[bytes] | None = None
        self._last: dict[int, float] = {}
        self._urged = 0

    def __enter__(self) -> _StopSignals:
        self._before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        if self.received:  # the signal came while the process was being made
            _stop_politely(process)

    def _on_signal(self, number: int, _frame: object) -> None:
        self.received.append(number)
        now = time.monotonic()
        again = now - self._last.get(number, -math.inf) < SAME_REQUEST_SECONDS
        self._last[number] = now
        # A terminal that is closed sends several SIGHUP, and systemd one after its SIGTERM: nobody urges by them.
        self._urged += not again and number != signal.SIGHUP
        if self._urged > 1:
            kill_descendants(spare=self._spare)
        elif len(self.received) == 1 and self._process is not None:
            _stop_politely(self._process)


def kill_descendants(spare: set[int]) -> None:
    """SIGKILL every descendant of this process but `spare`, and wait until they are gone."""
    while victims := [child for child in psutil.Process().children(recursive=True) if child.pid not in spare]:
        for victim in victims:
            _signal(victim, signal.SIGKILL)
        _, alive = psutil.wait_procs(victims, timeout=REAP_SECONDS)
        if alive:
            return  # stuck inside the kernel: no signal reaches them, and waiting longer helps nobody


def _stop_politely(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):  # a terminal that has gone
        os.write(2, STOPPING)  # not print: the signal may have come inside another one
    with suppress(psutil.NoSuchProcess):
        command = psutil.Process(process.pid)
        for target in command.children() or [command]:
            _signal(target, signal.SIGTERM)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


@contextmanager
def _output(redirect: Path | None) -> Iterator[int | None]:
    if redirect is None:
        yield None
        return
    with redirect.open("ab") as file:
        yield file.fileno()


def _adopt_orphans() -> None:
    """Let processes whose parent dies become ours: ranks live in sessions of their own, where no killpg finds them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_with_parent() -> Callable[[], None] | None:
    """What a child runs before its command, so that it gets SIGTERM even when the launcher is killed with SIGKILL."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # loaded here: after a fork only async-safe calls are safe

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # the launcher died before the line above

    return prepare
