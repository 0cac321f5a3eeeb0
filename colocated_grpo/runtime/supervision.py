"""Stopping on request, and not outliving a dead peer."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.signals import stop_signals

POLL_SECONDS = 1.0
FAILED, STOP = "failed", "stop"
END_OF_A_PROCESS = 1.0
"""Seconds from the moment its connections break until a process is gone."""
BEHIND_THE_FIRST = 1.5
"""Seconds that other ranks outlive the first failure: torchrun blames the earliest and stamps in whole seconds."""


class Process(NamedTuple):
    table: tuple[str, str, str]
    """Machine, its boot and the namespace: ids are those of one table of processes."""
    pid: int


class StopRequest:
    """SIGTERM, SIGINT or SIGHUP to any rank asks every rank to stop at the next safe point."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store.clone()  # see Watchdog
        self._asked = threading.Event()
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        _end_children_by(stop_signals())

    def _on_signal(self, number: int, _frame: object) -> None:
        self._asked.set()

    def notice(self) -> None:
        """Exchange requests with the other nodes. Called by the watchdog thread, never inside a signal handler."""
        if self._asked.is_set():
            self._store.set(STOP, "1")
        elif self._store.check([STOP]):
            self._asked.set()

    def asked(self) -> bool:
        """Rank-local view; ranks agree on it only through a collective."""
        return self._asked.is_set()


def _end_children_by(numbers: Sequence[signal.Signals]) -> None:
    """Let these signals end forked children, such as the process pools of a reward.

    With the handler of a rank they would live on, and whoever ended them would wait for them without end.
    """
    of_thread = threading.local()

    def before() -> None:
        # What comes too early for the child's own setting would be taken by the handler.
        of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, of_thread.mask)

    def in_child() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


class Watchdog:
    """A thread that ends this process soon after any other rank has died.

    A rank that waits in a collective for a dead peer cannot notice by itself: the wait happens in C++ and may last
    hours. The thread looks at the processes of its own node, and at a key in the shared store for the other nodes.
    Its connection to the store is its own: a shared one is locked while the main thread waits for a key, as it does
    when groups are made, and a rank that dies then would go unnoticed.
    """

    def __init__(self, world: World, stop: StopRequest) -> None:
        self._store = world.store.clone()
        self._stop = stop
        self._done = threading.Event()
        own = own_process()
        self._siblings = visible_from(own, world.gather_objects(own))
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            try:
                self._stop.notice()
                failed = self._store.check([FAILED])
            except (RuntimeError, dist.DistNetworkError):
                failed = True  # the store lives in rank 0's process tree: unreachable means that it is gone
            if self._done.is_set():
                return
            gone = self._dead_ranks()
            if failed or gone:
                if self._report_failure() and gone:
                    print(f"error: {left_without_a_word(gone)}", file=sys.stderr)
                sys.stderr.flush()
                time.sleep(BEHIND_THE_FIRST)
                os._exit(1)

    def _report_failure(self) -> bool:
        """Whether nobody else has done so before."""
        try:
            return self._store.add(FAILED, 1) == 1
        except (RuntimeError, dist.DistNetworkError):
            return True  # nobody left to tell

    def failed(self) -> bool:
        """Tell every node at once that this rank is about to end with an error; whether it is the first that does."""
        self._done.set()
        first = self._report_failure()
        if not first:
            time.sleep(BEHIND_THE_FIRST)
        return first

    def gone(self) -> list[int]:
        """Ranks of this node whose processes have ended, or are about to: a broken connection is seen before that."""
        deadline = time.monotonic() + END_OF_A_PROCESS
        while not (gone := self._dead_ranks()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 20)
        return gone

    def _dead_ranks(self) -> list[int]:
        return [rank for pid, rank in self._siblings.items() if _is_dead(pid)]

    def close(self) -> None:
        """Stop watching. Call on every rank, then a barrier, before any process ends in good order."""
        self._done.set()
        self._thread.join()


def own_process() -> Process:
    """The host's name alone would not do: containers that share the host's network have it in common."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Process(table=(os.uname().nodename, boot, os.readlink("/proc/self/ns/pid")), pid=os.getpid())


def visible_from(own: Process, processes: Sequence[Process]) -> dict[int, int]:
    """Ranks by id of those others whose ids mean the same process here as there."""
    same = [(rank, other.pid) for rank, other in enumerate(processes) if other.table == own.table]
    return {pid: rank for rank, pid in same if pid != own.pid}


def left_without_a_word(ranks: Sequence[int]) -> str:
    whose = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return (
        f"the process of {whose} is gone: killed, for example when memory ran out, or ended by user code; "
        "--resume auto continues from the last checkpoint"
    )


def _is_dead(pid: int) -> bool:
    """True for a process that is gone or waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
