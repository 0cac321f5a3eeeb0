"""The start of the ranks: who is missing is named, and a rank that dies before there is a group ends the others."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from colocated_grpo.errors import AlreadyReported, RunError
from colocated_grpo.launch.rank import RankProcess
from colocated_grpo.runtime import joining, rendezvous, supervision
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.joining import Joined, join
from colocated_grpo.runtime.program import exit_on_stop_signals
from colocated_grpo.runtime.rendezvous import LinkAddress, NodeLinks
from colocated_grpo.runtime.supervision import StopRequest, Watchdog, explain_missing_ranks
from colocated_grpo.runtime.verdict import VERDICT_VARIABLE, read_verdicts
from colocated_grpo.settings.training import PolicyConfig
from tests.support.ranks import Ranks, in_process_group, run_on_ranks
from tests.support.servers import free_port, until

SECONDS_TO_NOTICE = 60.0
"""On an idle machine it takes 3. Without the watchdog, a rank would wait for minutes."""
STARTED = 120.0
WHERE = "MASTER_ADDR=127.0.0.1 MASTER_PORT=%d"


def join_without_launcher(port: int) -> Joined:
    """Join as under srun: rank 0 serves the store."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return join()


@contextmanager
def ending_of_a_rank(errors: Path) -> Generator[None]:
    """Write errors into a file, and exit as a rank does after one."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    try:
        yield
    except RunError as error:
        os.write(2, f"error: {error}\n".encode())
        os._exit(1)
    except AlreadyReported:
        os._exit(1)


def block_in_the_start(port: int, joined, idle_rank: int, errors: Path) -> None:
    rank = int(os.environ["RANK"])
    with ending_of_a_rank(errors):
        own = join_without_launcher(port)
        joined[rank].set()
        if rank == idle_rank:
            signal.pause()  # as in an import
        RankProcess(own, STARTED, "rollout.reward_timeout", PolicyConfig())


def join_alone() -> tuple[bytes, set[str]]:
    """Join as the launcher's only rank. Returns a stored value and the addresses that listen."""
    store = join_without_launcher(0).store
    store.set("key", "value")
    listening = {one.laddr.ip for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}
    return store.get("key"), listening


def test_single_ranks_have_their_own_stores_that_no_other_machine_reaches():
    with Ranks(join_alone, 1) as first, Ranks(join_alone, 1) as second:
        assert first.results(STARTED) == second.results(STARTED) == [(b"value", {"127.0.0.1"})]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_before_there_is_a_process_group_ends_the_others_within_seconds(tmp_path, victim):
    joined = [Ranks.context.Event() for _ in range(2)]
    with Ranks(block_in_the_start, 2, free_port(), joined, victim, tmp_path / "errors") as ranks:
        assert all(event.wait(STARTED) for event in joined)
        survivor = ranks.processes[1 - victim]
        ranks.processes[victim].kill()
        survivor.join(SECONDS_TO_NOTICE)
        assert survivor.exitcode == 1
    assert (tmp_path / "errors").read_text() == f"error: {explain_missing_ranks([victim])}\n"


def start_two_of_four(port: int, started: Any, errors: Path) -> None:
    """Join, and let the time limit pass once both ranks have started."""
    os.environ["WORLD_SIZE"] = "4"
    wait_for_keys = joining.wait_for_keys

    def wait(store: Any, keys: Sequence[str], deadline: float) -> list[str]:
        if keys == [joining.COMPLETE_KEY]:
            started.wait(STARTED)
            deadline -= joining.JOIN_SECONDS
        return wait_for_keys(store, keys, deadline)

    joining.wait_for_keys = wait
    with ending_of_a_rank(errors):
        join_without_launcher(port)


def test_ranks_that_never_start_are_named_once_after_the_time_limit(tmp_path):
    started = Ranks.context.Barrier(2)
    with Ranks(start_two_of_four, 2, free_port(), started, tmp_path / "errors") as ranks:
        assert ranks.exit_codes(STARTED) == [1, 1]
    line = "ranks 2, 3 of 4 did not start within 600 s: see the output of the node, or start all nodes"
    assert (tmp_path / "errors").read_text() == f"error: {line}\n"


def join_with_another_size(port: int, errors: Path) -> None:
    if os.environ["RANK"] == "1":
        os.environ["WORLD_SIZE"] = "3"
    with ending_of_a_rank(errors):
        join_without_launcher(port)


def test_nodes_with_other_numbers_of_ranks_end_with_one_line(tmp_path):
    with Ranks(join_with_another_size, 2, free_port(), tmp_path / "errors") as ranks:
        assert ranks.exit_codes(STARTED) == [1, 1]
    line = (tmp_path / "errors").read_text()
    sizes = [f"WORLD_SIZE={own}, but {other} on another node" for own, other in ((2, 3), (3, 2))]
    assert line in [f"error: {size}: all nodes need the same number of ranks\n" for size in sizes]


def start_without_rank_0(port: int, errors: Path) -> None:
    os.environ |= {"RANK": "1", "WORLD_SIZE": "4"}
    joining.JOIN_SECONDS = 1.0
    with ending_of_a_rank(errors):
        join_without_launcher(port)


def join_rank_0(port: int) -> None:
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2"}
    exit_on_stop_signals(lambda: "stopped")
    join_without_launcher(port)


def test_a_rank_that_waits_for_the_answer_of_rank_0_stops_at_once():
    with socket.create_server(("127.0.0.1", 0)) as silent, Ranks(join_rank_0, 1, silent.getsockname()[1]) as ranks:
        silent.accept()[0].close()  # looks for a listener
        with silent.accept()[0]:
            ranks.processes[0].terminate()
            assert ranks.exit_codes(SECONDS_TO_NOTICE) == [128 + signal.SIGTERM]


def test_a_rank_0_that_never_starts_is_named_after_the_time_limit(tmp_path):
    port = free_port()
    with Ranks(start_without_rank_0, 1, port, tmp_path / "errors") as ranks:
        assert ranks.exit_codes(STARTED) == [1]
    line = f"{WHERE % port}: rank 1 has not reached rank 0 there for 1 s (Connection refused)"
    assert (tmp_path / "errors").read_text() == f"error: {line}\n"


def fail_on_another_node(world, folder: Path) -> None:
    """Watch no processes, as ranks of different nodes do."""
    os.environ[VERDICT_VARIABLE] = str(folder)
    supervision.STORE_SECONDS = STARTED
    watchdog = Watchdog(world.store, StopRequest(world.store), world.rank)
    world.barrier()
    if world.rank == 1:
        assert watchdog.report_failure("policy.lr=0.1: the gradient is not finite")
    signal.pause()


def test_the_launcher_of_a_node_shows_the_error_of_the_node_that_failed_first(tmp_path):
    with Ranks(in_process_group, 2, fail_on_another_node, tmp_path) as ranks:
        ranks.processes[0].join(STARTED)
        assert ranks.processes[0].exitcode == 1
    line = "error: rank 1 of another node failed first: policy.lr=0.1: the gradient is not finite"
    [verdict] = read_verdicts(tmp_path)
    assert (verdict.code, verdict.lines) == (1, [line])


@pytest.fixture
def listening() -> tuple[NodeLinks, LinkAddress]:
    links = NodeLinks()
    return links, links.listen("127.0.0.1")


def test_a_connection_that_ends_is_the_end_of_its_rank(listening):
    links, address = listening
    other = NodeLinks()
    other.connect(3, address)
    assert links.lost() == other.lost() == []
    other.close()
    until(links.lost)
    assert [tuple(lost) for lost in links.lost()] == [(0, "127.0.0.1", False)]


def test_a_stranger_at_the_port_is_not_a_rank(listening, monkeypatch):
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.1)
    links, address = listening
    for hello in (b"", b"GET / HTTP/1.1\r\n", b"0" * len(address.token)):
        with socket.create_connection((address.host, address.port)) as stranger:
            stranger.sendall(hello)
            assert links.lost() == []
        assert links.lost() == []
    first = NodeLinks()
    first.connect(1, address)
    assert links.lost() == []
    first.close()
    until(links.lost)
    assert [lost.rank for lost in links.lost()] == [0]


def close_beside_a_child(_world: World) -> list[int]:
    """Fork a child, close a connection, and wait until its other end notices. Returns the ranks that it has lost."""
    links, other = NodeLinks(), NodeLinks()
    other.connect(1, links.listen("127.0.0.1"))
    assert links.lost() == []
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b".")
        time.sleep(STARTED)
        os._exit(0)
    os.read(reader, 1)
    other.close()
    try:
        until(links.lost, SECONDS_TO_NOTICE)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [lost.rank for lost in links.lost()]


def test_a_forked_child_does_not_hold_the_connections_of_its_rank():
    assert run_on_ranks(close_beside_a_child, 1) == [[0]]
