"""Stops a run on request, and ends a rank soon after any other rank has died."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.signals import reset_in_forked_children, stop_signals
from colocated_grpo.runtime.verdict import VERDICT_VARIABLE, read_verdict, verdict_written

POLL_SECONDS = 1.0
FAILED_KEY, STOP_KEY = "failed", "stop"
EXIT_SECONDS = 1.0
"""Longest wait for a process to exit after its connections have closed."""
DELAY_AFTER_FIRST_FAILURE = 1.5
"""Delay in seconds before the other ranks exit. torchrun blames the earliest exit, compared in whole seconds."""


class ProcessId(NamedTuple):
    table: tuple[str, str, str]
    """Host name, boot id and PID namespace. Process ids are comparable only within one such table."""
    pid: int


class StopRequest:
    """Turns SIGTERM, SIGINT or SIGHUP on any rank into a request that every rank stops at its next safe point.

    The signals keep their handlers until `listen` is called.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = _own_connection(store)
        self._requested = threading.Event()
        self.reason: str | None = None
        """The error because of which this rank stops; None after a signal."""
        self._before = {number: signal.getsignal(number) for number in stop_signals()}
        self._stop_resetting_children = reset_in_forked_children(list(self._before))

    def listen(self) -> None:
        """Install the signal handlers. Call from the main thread, once there is something to save."""
        for number in self._before:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._requested.set()

    def request(self, reason: str) -> None:
        """Stop all ranks because of an error, after which the run's state is still whole."""
        self.reason = self.reason or reason
        self._requested.set()

    def exchange(self) -> None:
        """Publish this rank's request, or adopt another rank's. For the watchdog thread, not for signal handlers."""
        if self._requested.is_set():
            self._store.set(STOP_KEY, "1")
        elif self._store.check([STOP_KEY]):
            self._requested.set()

    def close(self) -> None:
        """Restore the signal handlers that this request has replaced. Call from the main thread."""
        for number, handler in self._before.items():
            # None: a handler that was not installed by Python, which Python cannot install again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._stop_resetting_children()

    def requested(self) -> bool:
        """True if this rank has seen a request. Ranks may differ for a second; only a collective makes them agree."""
        return self._requested.is_set()


class Watchdog:
    """A thread that ends this process soon after any other rank has died.

    A rank inside a collective cannot detect a dead peer: the wait happens in C++ and may last hours. This thread polls
    the processes of its own node, and a key in the store for those of other nodes.
    """

    def __init__(
        self, world: World, stop: StopRequest, *, before_exit: Callable[[str | None], None] = lambda line: None
    ) -> None:
        """Collective: gathers the process ids of all ranks.

        before_exit: called before this process is ended because of another rank, with the error line unless that rank
        has reported its failure itself.
        """
        self._store = _own_connection(world.store)
        self._stop = stop
        self._before_exit = before_exit
        self._done = threading.Event()
        own = own_process()
        self._siblings = visible_from(own, world.gather_objects(own))
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            try:
                self._stop.exchange()
                failed = self._store.check([FAILED_KEY])
            except (RuntimeError, dist.DistNetworkError):
                failed = True  # the store is in rank 0's process tree, which must have ended
            if self._done.is_set():
                return
            dead = self._dead_ranks()
            if failed or dead:
                self._leave(dead)
                sys.stderr.flush()
                time.sleep(DELAY_AFTER_FIRST_FAILURE)
                os._exit(1)

    def _leave(self, dead: Sequence[int]) -> None:
        """Show and record why this process ends, if this rank is the first to notice."""
        if not (self._is_first_failure() and dead):
            self._before_exit(None)
        elif verdict_written():  # by the same node's guard process or rank, for the launcher
            _, lines = read_verdict(Path(os.environ[VERDICT_VARIABLE]))
            self._before_exit(lines.removeprefix("error: "))
        else:
            line = explain_missing_ranks(dead)
            self._before_exit(line)
            print(f"error: {line}", file=sys.stderr)

    def _is_first_failure(self) -> bool:
        """Record a failure in the store. Return True where none was recorded before, or where the store is gone."""
        try:
            return self._store.add(FAILED_KEY, 1) == 1
        except (RuntimeError, dist.DistNetworkError):
            return True

    def report_failure(self) -> bool:
        """Stop watching and make other ranks exit. Return True if this rank failed first, else False after a delay."""
        self._done.set()
        first = self._is_first_failure()
        if not first:
            time.sleep(DELAY_AFTER_FIRST_FAILURE)
        return first

    def missing_ranks(self) -> list[int]:
        """Return the ranks of this node whose processes have exited. Waits up to `EXIT_SECONDS` for one to exit."""
        deadline = time.monotonic() + EXIT_SECONDS
        while not (dead := self._dead_ranks()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 20)
        return dead

    def _dead_ranks(self) -> list[int]:
        return [rank for pid, rank in self._siblings.items() if _is_dead(pid)]

    def close(self) -> None:
        """Stop watching. Before a normal exit, every rank calls this and then enters a barrier."""
        self._done.set()
        self._thread.join()


def own_process() -> ProcessId:
    """Return this process's id. Host name and pid are not unique: containers on the host's network have its name."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ProcessId(table=(os.uname().nodename, boot, os.readlink("/proc/self/ns/pid")), pid=os.getpid())


def visible_from(own: ProcessId, processes: Sequence[ProcessId]) -> dict[int, int]:
    """Return {pid: rank} of the other processes in `own`'s process table. `processes` is in rank order."""
    same = [(rank, other.pid) for rank, other in enumerate(processes) if other.table == own.table]
    return {pid: rank for rank, pid in same if pid != own.pid}


def explain_missing_ranks(ranks: Sequence[int]) -> str:
    """Return the error line for ranks whose processes ended without reporting an error."""
    whose = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return (
        f"the process of {whose} ended without an error message: killed, for example out of memory, or ended by user "
        "code; --resume auto continues from the last checkpoint"
    )


def _own_connection(store: dist.Store) -> dist.Store:
    """Return `store` over a TCP connection of its own.

    A connection is locked while any thread waits for a key, as the main thread does while process groups are created.
    On a shared connection the watchdog would be blocked then, and a rank that dies would not be detected.
    """
    return store.clone()  # pyrefly: ignore[missing-attribute]  (torch 2.13's stubs lack Store.clone)


def _is_dead(pid: int) -> bool:
    """Return True for a process that has exited, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
