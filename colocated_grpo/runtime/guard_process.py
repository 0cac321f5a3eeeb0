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
from collections import Counter, deque
from contextlib import suppress
from itertools import takewhile
from typing import NamedTuple

ALIVE, ARMED, DISARMED = b".+-"
POLL_SECONDS = 0.25
DUMP_SIGNAL = signal.SIGRTMIN + 11
"""Makes a thread write its stack, inside the C-level handler. No library uses this number."""
DUMP_SECONDS = 0.5
SAMPLES, SAMPLE_SECONDS = 5, 0.02
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
REWARD_CALLS = os.path.join("rollout", "reward_calls.py")
"""File of this package below which the thread of a reward runs only user code."""
RESUME = "--resume auto continues from the last checkpoint"
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class Options(NamedTuple):
    """What the rank passes as JSON."""

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
        while os.getppid() == self.pid:
            ready, _, _ = select.select([0], [], [], POLL_SECONDS)
            data = os.read(0, 1 << 16) if ready else b""
            if ready and not data:
                return
            now = time.monotonic()
            # At most one interval: a suspended machine or a delay of this process is not the rank's silence.
            self.silent += min(now - since, 2 * POLL_SECONDS)
            since = now
            self._read(data)
            if self.silent > self._limit() and self._end_if_blocked():
                return

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
        if place is None:
            self.silent = 0.0
            return False
        if self.stopping:
            why = "a stop was requested, and"
        else:
            why = f"{self.options.setting}: no thread of rank {self.options.rank} could run, because"
        line = f"error: {why} {place} holds Python's interpreter lock; the rank was killed; {RESUME}"
        self._report(line)
        os.kill(self.pid, signal.SIGKILL)
        return True

    def _report(self, line: str) -> None:
        if self.options.verdict is not None:
            with suppress(OSError), open(self.options.verdict, "w", encoding="utf-8") as file:
                file.write(f"1\n{line}")
                return
        print(line, file=sys.stderr, flush=True)

    def _place(self) -> str | None:
        """Return the line of user code in a thread that computes; if none computes, in any thread."""
        tasks = [int(name) for name in os.listdir(f"/proc/{self.pid}/task")]
        running = Counter[int]()
        for _ in range(SAMPLES):
            running.update(task for task in tasks if _stat(self.pid, task)[0] in "RD")
            time.sleep(SAMPLE_SECONDS)
        busy = [task for task, count in running.items() if count > SAMPLES / 2]  # waiting threads wake up now and then
        places = (user_place(self._stack(task), self.options.foreign, self.options.package) for task in busy or tasks)
        return next(filter(None, places), None)

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


def user_place(dump: str, foreign: list[str], package: str) -> str | None:
    """Return the innermost line of user code in faulthandler's dump of a thread, as 'judge (my_rewards.py, line 12)'.

    In a reward from an installed package: the line of the reward function. None if the thread runs no user code.
    """
    frames = [frame.groups() for frame in FRAME.finditer(dump)]
    found = next((frame for frame in frames if not frame[0].startswith(tuple(foreign))), None)
    if found is None and any(file.endswith(REWARD_CALLS) for file, _, _ in frames):
        inner = takewhile(lambda frame: not frame[0].startswith(package), frames)
        found = next(iter(deque(inner, maxlen=1)), None)
    if found is None:
        return None
    outwards = (name for file, _, name in frames[frames.index(found) :] if file == found[0])
    function = next((name for name in outwards if not name.startswith("<")), found[2])  # not a comprehension
    return f"{function} ({os.path.basename(found[0])}, line {found[1]})"


def _stat(pid: int, task: int | None = None) -> tuple[str, int]:
    """Return state and parent of a process or thread; those of a dead one if it has ended."""
    path = f"/proc/{pid}/stat" if task is None else f"/proc/{pid}/task/{task}/stat"
    try:
        with open(path) as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)


if __name__ == "__main__":
    Guard(Options(**json.loads(sys.argv[1]))).watch()
