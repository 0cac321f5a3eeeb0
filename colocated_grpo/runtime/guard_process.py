"""Process beside a rank that ends it when user code blocks it. Run as a file, with the standard library only.

Python code that holds the interpreter lock (GIL), such as a regular expression that backtracks for hours, stops every
thread of the rank: its timeouts, its signal handlers and its watchdog. This process needs none of them. It reads single
bytes from stdin: a sign of life, the begin and end of user code, and the numbers of the stop signals, which the rank's
C-level signal handler writes. It exits when the rank does.
"""

import ctypes
import json
import os
import re
import select
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from itertools import takewhile
from typing import NamedTuple

ALIVE, ARMED, DISARMED = b".+-"
POLL_SECONDS = 0.25
DUMP_SIGNAL = signal.SIGRTMIN + 11
"""Makes a thread write its stack, inside the C-level handler. No library uses this number."""
DUMP_SECONDS = 0.5
SAMPLE_SECONDS = 0.4
DISK_TICKS = 20
"""Processor time credited to a thread that waits for a disk, so that it is not taken for one that sleeps."""
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
REWARD_CALL = os.path.join("rollout", "reward_calls.py"), "_run"
"""File and function of this package below which the thread of a reward runs only user code."""
RESUME = "--resume auto continues from the last checkpoint"
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class Options(NamedTuple):
    """Settings that the rank passes as JSON."""

    rank: str
    pid: int
    """The rank's process, which is the parent of this one."""
    setting: str
    """The setting with the limit, for the message."""
    seconds: float
    """Longest silence while user code runs."""
    stop_seconds: float
    """Longest silence of a rank that is to stop."""
    dumps: int
    """Descriptor of the pipe into which the rank's threads write their stacks."""
    verdict: str | None
    """File for the launcher; None: print."""
    foreign: list[str]
    """Prefixes of file names that are not user code."""
    package: str
    """The one of them that is this package."""
    agent: int | None
    """The rank's parent where that is torchrun. If it dies, the rank is to stop."""


class Guard:
    """The state of one rank as seen from outside."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.pid = options.pid
        self.silent = 0.0
        self.armed = self.stopping = False

    def watch(self) -> None:
        """Return when the rank has ended, by itself or by this process."""
        since = time.monotonic()
        while os.getppid() == self.pid and self._receive(POLL_SECONDS):
            now = time.monotonic()
            # At most one interval: a suspended machine or a delay of this process is not the rank's silence.
            self.silent += min(now - since, 2 * POLL_SECONDS)
            since = now
            if self.silent > self._limit() and self._end_if_blocked():
                return

    def _receive(self, seconds: float) -> bool:
        """Read what the rank writes within `seconds`. Returns False when it has closed the pipe."""
        if select.select([0], [], [], seconds)[0]:
            data = os.read(0, 1 << 16)
            self._read(data)
            return bool(data)
        self._read(b"")
        return True

    def _read(self, data: bytes) -> None:
        for byte in data:
            if byte in (ALIVE, ARMED, DISARMED):
                self.silent = 0.0
                self.armed = byte == ARMED or (self.armed and byte == ALIVE)
            elif byte in STOP_SIGNALS:
                self._stop()
        if self.options.agent not in (None, _stat(self.pid)[1]):
            self._stop()

    def _stop(self) -> None:
        if not self.stopping:
            self.stopping, self.silent = True, 0.0

    def _limit(self) -> float:
        if self.stopping:
            return self.options.stop_seconds
        return self.options.seconds if self.armed else float("inf")

    def _end_if_blocked(self) -> bool:
        """Kill the rank if user code blocks it. Libraries also hold the lock, such as a writer of large files."""
        place = None if _stat(self.pid)[0] in "tT" else self._place()
        ended = not self._receive(0)
        if ended or place is None or not self.silent:  # 0: the rank has shown life meanwhile
            self.silent = 0.0
            return ended
        why = f"a stop was requested, and {place} holds Python's interpreter lock"
        if not self.stopping:
            blocked = (
                f"no thread of rank {self.options.rank} could run, because {place} holds Python's interpreter lock"
            )
            why = f"{self.options.setting}: {blocked}"
        self._report(f"error: {why}; the rank was killed; {RESUME}")
        os.kill(self.pid, signal.SIGKILL)
        return True

    def _report(self, line: str) -> None:
        if self.options.verdict is not None:
            with suppress(OSError), open(self.options.verdict, "w", encoding="utf-8") as file:
                file.write(f"1\n{line}")
                return
        print(line, file=sys.stderr, flush=True)

    def _place(self) -> str | None:
        """Return the line of user code in a thread that computes; if none computes, in any thread.

        Not by its state: a thread that waits for the lock wakes up every 5 ms, and is then often seen as running.
        """
        tasks = [int(name) for name in os.listdir(f"/proc/{self.pid}/task")]
        before = {task: _ticks(self.pid, task) for task in tasks}
        time.sleep(SAMPLE_SECONDS)
        used = {task: _ticks(self.pid, task, on_disk=DISK_TICKS) - before[task] for task in tasks}
        busy = [task for task in tasks if used[task] > 0 and used[task] >= max(used.values()) / 2]
        return user_place([self._stack(task) for task in busy or tasks], self.options.foreign, self.options.package)

    def _stack(self, task: int) -> str:
        """Return the stack of one thread, which writes it inside a C-level signal handler; '' if it runs no Python."""
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "tgkill"):
            os.kill(self.pid, DUMP_SIGNAL)  # an old C library: the main thread's stack
        else:
            libc.tgkill(self.pid, task, DUMP_SIGNAL)
        return read_dump(self.options.dumps, DUMP_SECONDS)


def read_dump(descriptor: int, seconds: float) -> str:
    """Return what is written into the pipe within `seconds`, up to a short pause."""
    parts = []
    while select.select([descriptor], [], [], 0.05 if parts else seconds)[0]:
        if not (part := os.read(descriptor, 1 << 16)):
            break
        parts.append(part)
    return b"".join(parts).decode(errors="replace")


def user_place(dumps: list[str], foreign: list[str], package: str) -> str | None:
    """Return the innermost line of user code in faulthandler's dumps of threads, as 'judge (my_rewards.py, line 12)'.

    If there is none, the line of a reward function from an installed package. None if no thread runs user code.
    """
    threads = [[frame.groups() for frame in FRAME.finditer(dump)] for dump in dumps]
    for frames in threads:
        own = [frame for frame in frames if not frame[0].startswith(tuple(foreign))]
        if own:
            return _described(own[0], frames)
    for frames in threads:
        if any(file.endswith(REWARD_CALL[0]) and name == REWARD_CALL[1] for file, _, name in frames):
            called = deque(takewhile(lambda frame: not frame[0].startswith(package), frames), maxlen=1)
            if called:
                return _described(called[0], frames)
    return None


def _described(found: tuple[str, ...], frames: list[tuple[str, ...]]) -> str:
    outwards = (name for file, _, name in frames[frames.index(found) :] if file == found[0])
    function = next((name for name in outwards if not name.startswith("<")), found[2])  # not a comprehension
    return f"{function} ({os.path.basename(found[0])}, line {found[1]})"


def _stat(pid: int) -> tuple[str, int]:
    """Return state and parent of a process; those of a dead one if it has ended."""
    fields = _fields(f"/proc/{pid}/stat")
    return (fields[0], int(fields[1])) if fields else ("X", 0)


def _ticks(pid: int, task: int, on_disk: int = 0) -> int:
    """Return the processor time that a thread has used, plus `on_disk` if it waits for a disk."""
    fields = _fields(f"/proc/{pid}/task/{task}/stat")
    return int(fields[11]) + int(fields[12]) + (on_disk if fields[0] == "D" else 0) if fields else 0


def _fields(path: str) -> list[str]:
    """Return the fields after the name, which may contain spaces; none if the process has ended."""
    try:
        with open(path) as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    Guard(Options(**json.loads(sys.argv[1]))).watch()
