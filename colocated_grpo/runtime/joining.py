"""Joins the ranks before the process group exists: opens their store, exchanges process ids, and detects lost ranks.

Joining needs only torch and happens before the slow imports. A rank that is killed during them ends the others too.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import NamedTuple, NoReturn, Self

import psutil
import torch.distributed as dist

from colocated_grpo.errors import AlreadyReported, ConfigError, RunError, in_one_line
from colocated_grpo.runtime import parents_death, processes
from colocated_grpo.runtime.program import JOIN_VARIABLE, STORE_VARIABLE
from colocated_grpo.runtime.rendezvous import LinkAddress, own_address, serve_store, wait_for_keys, wait_for_listener
from colocated_grpo.runtime.supervision import FAILED_KEY, ProcessId, StopRequest, Watchdog, named_ranks, own_process

JOIN_SECONDS = float(os.environ.get(JOIN_VARIABLE, 600.0))
"""Maximum wait for a rank that has not started. `srun` and torchrun start all ranks of a node at once."""
LISTENER_SECONDS, START_TIMEOUT = 5.0, timedelta(minutes=1)
"""Maximum waits of a node that cannot start: for node 0, and for the imports of its rank 0."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_runs = count()
"""Numbers the successive runs of this process. All ranks count alike, because joining is collective."""
SIZE_KEY, MEMBER_KEY, COUNT_KEY, COMPLETE_KEY = "size", "member", "members", "complete"


class Member(NamedTuple):
    """Description of a rank, published to the other ranks."""

    process: ProcessId
    link: LinkAddress | None
    """None on the node of rank 0."""

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        (table, pid), link = json.loads(text)
        return cls(ProcessId(tuple(table), pid), None if link is None else LinkAddress(*link))


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The joined ranks of the run, as seen by this rank."""

    store: dist.Store
    """The run's store. The process group is built on it."""
    stop: StopRequest
    watchdog: Watchdog

    def fail(self, error: BaseException) -> NoReturn:
        """Make the other ranks exit, and raise this rank's error, or what shows its cause. Call while handling it."""
        self.watchdog.stop_watching()
        # The error of a broken collective does not show the cause, so name the lost ranks. Other errors are its own.
        broken = isinstance(error, RuntimeError) and not isinstance(error, RunError)
        missing = self.watchdog.missing_ranks() if broken else None
        shown = error if missing is None else RunError(missing)
        one_line = isinstance(shown, RunError | ConfigError)
        if not self.watchdog.report_failure(str(shown) if one_line else in_one_line(shown)):
            # Not reported: it only repeats the error of the rank that failed first, or follows from its exit.
            raise AlreadyReported from error
        if shown is error:
            raise
        raise shown from error


def join(before_exit: Callable[[str | None], None] = lambda line: None) -> Joined:
    """Join the ranks described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Collective.

    From then on, this process ends soon after any other rank has ended. before_exit: as in `Watchdog`. Raises RunError,
    for example if a rank has not started within JOIN_SECONDS.
    """
    parents_death.continue_at_parents_death()
    deadline = time.monotonic() + JOIN_SECONDS
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    serves_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store, own = _of_this_run(_open_store(rank, serves=serves_store))
    stop = StopRequest(own)
    watchdog = Watchdog(own, stop, rank, serves_store=serves_store and size > 1, before_exit=before_exit)
    joined = Joined(store=store, stop=stop, watchdog=watchdog)
    try:
        _meet(own, watchdog, rank, size, deadline)
    except Exception as error:
        joined.fail(error)
    return joined


def report_failed_node(node: int, rank: int, line: str, address: tuple[str, int]) -> None:
    """End the other nodes, which wait for this one, with its error. rank: its first one. address: of node 0."""
    with suppress(OSError, RuntimeError):  # node 0 does not start either
        wait_for_listener(*address, LISTENER_SECONDS)
        _, own = _of_this_run(dist.TCPStore(*address, timeout=START_TIMEOUT))
        own.compare_set(FAILED_KEY, "", json.dumps([rank, f"node {node} did not start: {line}"]))


def _of_this_run(store: dist.Store) -> tuple[dist.Store, dist.Store]:
    """Return the parts of a store for this run, and for this package.

    torchrun's store outlives a run: restarts (--max-restarts) and later runs of these processes use the same store.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    store = dist.PrefixStore(f"attempt {restarts}, run {next(_runs)}", store)
    return store, dist.PrefixStore("colocated_grpo", store)


def _open_store(rank: int, *, serves: bool) -> dist.Store:
    """Connect to the run's store. serves: True if this process hosts the store; otherwise torchrun or rank 0 does."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    where = f"MASTER_ADDR={host} MASTER_PORT={port}"
    if (bound := os.environ.pop(STORE_VARIABLE, None)) is not None:  # the launcher has bound it for rank 0
        return serve_store(socket.socket(fileno=int(bound)), JOIN_SECONDS)
    if serves and port == 0:
        return serve_store(processes.bind_store(host, 0), JOIN_SECONDS)
    if not serves:
        try:
            wait_for_listener(host, port, JOIN_SECONDS)
        except OSError as error:
            waited = f"{JOIN_SECONDS:g} s ({error.strerror or error})"
            raise RunError(f"{where}: rank {rank} has not reached rank 0 there for {waited}") from error
    try:
        limit = timedelta(seconds=JOIN_SECONDS)
        with ThreadPoolExecutor(1) as thread:  # else no stop signal would be handled until rank 0 answers
            store = thread.submit(
                dist.TCPStore, host, port, is_master=serves, timeout=limit, wait_for_workers=False, multi_tenant=True
            )
            return store.result()
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise RunError(f"{where}: the port is in use; choose another one") from error
        what = "rank 0 cannot listen there" if serves else f"rank {rank} cannot open the store of rank 0 there"
        raise RunError(f"{where}: {what} ({in_one_line(error)})") from error


def _meet(store: dist.Store, watchdog: Watchdog, rank: int, size: int, deadline: float) -> None:
    if (other_size := store.compare_set(SIZE_KEY, "", str(size)).decode()) != str(size):
        raise RunError(f"WORLD_SIZE={size}, but {other_size} on another node: all nodes need the same number of ranks")
    process, link, keys = own_process(), None, [f"{MEMBER_KEY} {other}" for other in range(size)]
    if rank > 0:
        first = Member.from_json(_wait_for(store, keys[0], deadline, lambda: _not_started([0], size)))
        if first.process.table != process.table:
            link = watchdog.links.listen(own_address(os.environ["MASTER_ADDR"]))
    store.set(keys[rank], json.dumps(Member(process, link)))
    if store.add(COUNT_KEY, 1) == size:
        store.set(COMPLETE_KEY, "")

    def missing() -> str:
        return _not_started([other for other, key in enumerate(keys) if not store.check([key])], size)

    _wait_for(store, COMPLETE_KEY, deadline, missing)
    members = [Member.from_json(text) for text in store.multi_get(keys)]
    watchdog.watch([member.process for member in members])
    for other, (_, address) in enumerate(members):
        if rank == 0 and address is not None:
            try:
                watchdog.links.connect(other, address)
            except OSError as error:
                problem = f"rank 0 cannot connect to {address.host}, port {address.port} ({error.strerror or error})"
                raise RunError(f"rank {other}: {problem}; all nodes need free ports between each other") from error
    _choose_gloo_interface(rank, members)


def _wait_for(store: dist.Store, key: str, deadline: float, explain: Callable[[], str]) -> bytes:
    """Return the value of a key. Raises RunError with `explain()` after the deadline."""
    if wait_for_keys(store, [key], deadline):
        raise RunError(explain())
    return store.get(key)


def _not_started(ranks: Sequence[int], size: int) -> str:
    advice = "see the output of the node, or start all nodes"
    return f"{named_ranks(ranks)} of {size} did not start within {JOIN_SECONDS:g} s: {advice}"


def _choose_gloo_interface(rank: int, members: Sequence[Member]) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that reaches the other nodes, unless the user has set it.

    By default gloo uses the address of the machine's own host name, which is often 127.0.1.1.
    """
    links = [member.link for member in members if member.link is not None]
    if not links or GLOO_INTERFACE in os.environ:
        return
    own = members[rank].link
    address = own_address(links[0].host) if own is None else own.host
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            os.environ[GLOO_INTERFACE] = name
            return
