"""Stops a run on request, and ends each rank soon after another rank has died."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from colocated_grpo.runtime.program import reset_in_forked_children, stop_signals
from colocated_grpo.runtime.rendezvous import PROBE_SECONDS, PROBES, Lost, NodeLinks
from colocated_grpo.runtime.verdict import RUN_ERROR, VERDICT_VARIABLE, first_report, report

T = TypeVar("T")

POLL_SECONDS = 1.0
FAILED_KEY, STOP_KEY = "failed", "stop"
EXIT_SECONDS = 1.0
"""Maximum wait for a process to exit after its connections have closed."""
STORE_SECONDS = 2.0
"""Maximum wait for the store if its machine may be lost."""
DELAY_AFTER_FIRST_FAILURE = 1.5
"""Delay in seconds before the other ranks exit. torchrun reports the earliest exit as the cause, in whole seconds."""


class ProcessId(NamedTuple):
    table: tuple[str, str, str, str]
    """Host name, boot id, PID namespace and network namespace. Pids are comparable only if all four are equal."""
    pid: int


class StopRequest:
    """Turns SIGTERM, SIGINT or SIGHUP on any rank into a request that every rank stops at its next safe point.

    The signals keep their previous handlers until `listen` is called.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = _own_connection(store)
        self._requested = threading.Event()
        self.reason: str | None = None
        """The error that stops this rank; None after a signal."""
        self._before = {number: signal.getsignal(number) for number in stop_signals()}
        self._stop_resetting_children = reset_in_forked_children(list(self._before))

    def listen(self) -> None:
        """Install the signal handlers. Call from the main thread, once there is something to save."""
        for number in self._before:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._requested.set()

    def request(self, reason: str) -> None:
        """Stop all ranks because of an error that leaves the run's state intact."""
        self.reason = self.reason or reason
        self._requested.set()

    def exchange(self) -> None:
        """Publish this rank's request, or adopt another rank's. Called by the watchdog, not a signal handler."""
        if self._requested.is_set():
            self._store.set(STOP_KEY, "1")
        elif self._store.check([STOP_KEY]):
            self._requested.set()

    def close(self) -> None:
        """Restore the signal handlers that this request has replaced. Call from the main thread."""
        for number, handler in self._before.items():
            # None: the handler was not installed by Python, so Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._stop_resetting_children()

    def requested(self) -> bool:
        """True if this rank has seen a request. Ranks may differ for a second; they agree only through a collective."""
        return self._requested.is_set()


@dataclass(eq=False)
class Watchdog:
    """A thread that ends this process soon after any other rank has died.

    A rank in a collective cannot detect a dead peer: the wait happens in C++ and may last hours. This thread polls the
    processes of its own node and the connections to other nodes. A second thread polls a key in the store. The second
    thread may block, because the store's machine may no longer respond.
    """

    store: InitVar[dist.Store]
    stop: StopRequest
    rank: int
    serves_store: bool = False
    """True if this process serves the store to other ranks."""
    before_exit: Callable[[str | None], None] = lambda line: None
    """Called before another rank's failure ends this process. Its argument is the error line, or None if another rank
    records the error line."""

    def __post_init__(self, store: dist.Store) -> None:
        self._store = _own_connection(store)
        self.links = NodeLinks()
        self._siblings: dict[int, int] = {}
        self._done, self._closed = threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._failed = threading.Event()
        """Set when another rank has failed, or when the store is gone together with rank 0's process tree."""
        self._leaving = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=f"watchdog ({name})", daemon=True)
            for name, target in (("ranks", self._watch), ("store", self._poll_store))
        ]
        for thread in self._threads:
            thread.start()

    def watch(self, processes: Sequence[ProcessId]) -> None:
        """Watch the processes of this node. processes: the processes of all ranks, in rank order."""
        self._siblings = visible_from(own_process(), processes)

    def _poll_store(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            try:
                self.stop.exchange()
                failed = self._store.check([FAILED_KEY])
            except (RuntimeError, dist.DistNetworkError):
                failed = True
            if failed:
                self._failed.set()
                self._wake.set()
                return

    def _watch(self) -> None:
        while not self._done.is_set():
            self._wake.wait(POLL_SECONDS)
            dead, lost = self._dead_ranks(), self.links.lost()
            with self._leaving:
                if not self._done.is_set() and (dead or lost or self._failed.is_set()):
                    self._leave(dead, lost)
                    sys.stderr.flush()
                    time.sleep(DELAY_AFTER_FIRST_FAILURE)
                    os._exit(1)

    def _leave(self, dead: Sequence[int], lost: Sequence[Lost]) -> None:
        """Show and record why this process ends, if this rank is the first to detect the failure."""
        line = explain_missing_ranks(dead, lost)
        known = first_report() if dead else None  # the report that a dead rank wrote for the launcher
        if known is not None:
            line = " ".join(known.lines).removeprefix("error: ")
        if line is None or not self._is_first(line, dead):
            self.before_exit(None)
            self.show_failure_of_other_node()
        else:
            self.before_exit(line)
            if known is None:
                report(RUN_ERROR, [f"error: {line}"])

    def _is_first(self, line: str, dead: Sequence[int]) -> bool:
        """Record a failure in the store, and return True if it is the first.

        If the store is gone, all ranks detect it, and one live rank of each node reports it.
        """
        claim = json.dumps([self.rank, line])
        if (first := _within(STORE_SECONDS, lambda: self._store.compare_set(FAILED_KEY, "", claim))) is None:
            return self.rank < min({*self._siblings.values()} - {*dead}, default=self.rank + 1)
        return first.decode() == claim

    def show_failure_of_other_node(self) -> None:
        """Pass the error line of the first failed rank to this node's launcher, unless that rank is on this node."""
        if VERDICT_VARIABLE not in os.environ:
            return
        if (claim := _within(STORE_SECONDS, lambda: self._store.get(FAILED_KEY))) is not None:
            rank, line = json.loads(claim)
            if rank not in (self.rank, *self._siblings.values()):
                report(RUN_ERROR, [f"error: rank {rank} of another node failed first: {line}"])

    def stop_watching(self) -> None:
        """Do not end this process from now on, because it is failing by itself. Blocks if the watchdog is ending it."""
        with self._leaving:
            self._done.set()

    def report_failure(self, line: str) -> bool:
        """Stop watching and make others exit. Return True if this rank failed first; else wait and return False."""
        self.stop_watching()
        if not (first := self._is_first(line, self._dead_ranks())):
            self.show_failure_of_other_node()
        if not first or self.serves_store:  # the other ranks read the first failure in the store of this process
            time.sleep(DELAY_AFTER_FIRST_FAILURE)
        return first

    def missing_ranks(self) -> str | None:
        """Return the error line for lost ranks, or None. Waits up to `EXIT_SECONDS` for a rank to exit.

        Call after `stop_watching`.
        """
        deadline = time.monotonic() + EXIT_SECONDS
        while time.monotonic() < deadline and not self._failed.is_set():
            if line := explain_missing_ranks(self._dead_ranks(), self.links.lost()):
                return line
            time.sleep(POLL_SECONDS / 20)
        return None

    def _dead_ranks(self) -> list[int]:
        return [rank for pid, rank in self._siblings.items() if _is_dead(pid)]

    def close(self) -> None:
        """Stop watching. Before a normal exit, every rank calls this method and then enters a barrier."""
        self.stop_watching()
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(STORE_SECONDS)


def own_process() -> ProcessId:
    """Return this process's id. Host name and pid are not unique: containers on the host's network share its name."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")
    return ProcessId(table=(os.uname().nodename, boot, *namespaces), pid=os.getpid())


def visible_from(own: ProcessId, processes: Sequence[ProcessId]) -> dict[int, int]:
    """Return {pid: rank} of the other processes in `own`'s process table. `processes` is in rank order."""
    same = [(rank, other.pid) for rank, other in enumerate(processes) if other.table == own.table]
    return {pid: rank for rank, pid in same if pid != own.pid}


def explain_missing_ranks(dead: Sequence[int], lost: Sequence[Lost] = ()) -> str | None:
    """Return the error line for ranks that ended without reporting an error; None if there are none.

    dead: ranks of this node. lost: ranks of other nodes.
    """
    silent = [each for each in lost if each.silent]
    if silent:
        seconds = PROBE_SECONDS * (PROBES + 1)
        cause = "the machine or its network is lost; --resume auto continues from the last checkpoint"
        return f"{_hosts(silent)}, with {_ranks(silent)}, has not answered for {seconds} s: {cause}"
    if not dead and not lost:
        return None
    whose = named_ranks(dead) if dead else f"{_ranks(lost)} on {_hosts(lost)}"
    cause = "killed, for example out of memory, or ended by user code; --resume auto continues from the last checkpoint"
    return f"the process of {whose} ended without an error message: {cause}"


def _ranks(lost: Sequence[Lost]) -> str:
    return named_ranks([each.rank for each in lost])


def _hosts(lost: Sequence[Lost]) -> str:
    return ", ".join(dict.fromkeys(each.host for each in lost))


def named_ranks(ranks: Sequence[int]) -> str:
    """Return 'rank 3', or 'ranks 3, 5'."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return the result of a call to the store; None if it fails or the store's machine does not respond in time."""
    results: list[T] = []

    def target() -> None:
        with suppress(RuntimeError, dist.DistNetworkError):
            results.append(call())

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _own_connection(store: dist.Store) -> dist.Store:
    """Return `store` with a separate TCP connection.

    A connection is locked while any thread waits for a key, as the main thread does while process groups are created.
    On a shared connection, this wait would block the watchdog, and dead ranks would not be detected.
    """
    return store.clone()  # pyrefly: ignore[missing-attribute]  (torch 2.13's stubs lack Store.clone)


def _is_dead(pid: int) -> bool:
    """Return True for a process that has exited, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
