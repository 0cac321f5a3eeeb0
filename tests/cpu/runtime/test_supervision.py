"""No rank outlives a dead one, and a signal to one rank stops all ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from colocated_grpo.runtime import supervision
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.supervision import StopRequest, Watchdog, explain_missing_ranks, own_process, visible_from
from tests.support.ranks import Ranks, in_process_group, run_on_ranks

SECONDS_TO_NOTICE = 60.0
"""On an idle machine it takes 3. Without the watchdog, a rank would wait for minutes."""
STARTED = 120.0


def watched(world: World) -> tuple[StopRequest, Watchdog]:
    stop = StopRequest(world.store)
    stop.listen()
    watchdog = Watchdog(world.store, stop, world.rank)
    watchdog.watch(world.gather_objects(own_process()))
    return stop, watchdog


def wait_in_a_collective(world: World) -> None:
    dist.all_reduce(torch.zeros(1), group=world.control)


def wait_for_a_key(world: World) -> None:
    """Block in C++ on a healthy connection, as the creation of process groups does. Only the watchdog ends this."""
    world.store.wait(["never set"])


def block_on_all_ranks_but_one(world: World, waiting, way_to_wait, idle_rank: int) -> None:
    watched(world)
    waiting[world.rank].set()
    if world.rank == idle_rank:
        signal.pause()
    way_to_wait(world)


@pytest.mark.parametrize("way_to_wait", [wait_in_a_collective, wait_for_a_key])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_blocked_by_a_killed_one_ends_within_seconds(way_to_wait, victim):
    waiting = [Ranks.context.Event() for _ in range(2)]
    with Ranks(in_process_group, 2, block_on_all_ranks_but_one, waiting, way_to_wait, victim) as ranks:
        assert all(event.wait(STARTED) for event in waiting)
        survivor = ranks.processes[1 - victim]
        assert survivor.is_alive()
        ranks.processes[victim].kill()
        survivor.join(SECONDS_TO_NOTICE)
        assert survivor.exitcode not in (None, 0)


@pytest.mark.parametrize("differs", ["machine", "container"])
def test_processes_of_another_machine_or_container_are_not_watched_by_their_id(monkeypatch, differs):
    """With the same host name, as containers on the host's network have it, a foreign id would look like a dead one."""
    with monkeypatch.context() as elsewhere:
        if differs == "container":
            elsewhere.setattr(os, "readlink", lambda path: "pid:[4026532799]")
        else:
            elsewhere.setattr(Path, "read_text", lambda path: "00000000-0000-0000-0000-000000000000")
        foreign = own_process()._replace(pid=1 << 22)
    own = own_process()
    sibling = own._replace(pid=own.pid + 1)
    assert visible_from(own, [foreign, own, sibling]) == {sibling.pid: 2}


def find_the_killed_rank(world: World, waiting, killed, right) -> None:
    _, watchdog = watched(world)
    watchdog.stop_watching()
    supervision.EXIT_SECONDS = STARTED  # on a busy machine, a killed process may take a second to exit
    waiting[world.rank].set()
    if world.rank != 0:
        signal.pause()
    assert killed.wait(STARTED)
    if watchdog.missing_ranks() == explain_missing_ranks([1]):
        right.set()


def test_a_rank_can_identify_which_other_rank_was_killed():
    waiting = [Ranks.context.Event() for _ in range(3)]
    killed, right = Ranks.context.Event(), Ranks.context.Event()
    with Ranks(in_process_group, 3, find_the_killed_rank, waiting, killed, right) as ranks:
        assert all(event.wait(STARTED) for event in waiting)
        ranks.processes[1].kill()
        killed.set()
        assert right.wait(STARTED)


def fail_on_rank_one(world: World, waiting) -> None:
    _, watchdog = watched(world)
    waiting[world.rank].set()
    if world.rank == 1:
        assert watchdog.report_failure("the cause"), "the first to fail"
        signal.pause()  # still alive: the other rank must read the failure from the store
    wait_for_a_key(world)


def test_a_rank_that_reports_its_failure_ends_the_others_while_it_is_still_alive():
    waiting = [Ranks.context.Event() for _ in range(2)]
    with Ranks(in_process_group, 2, fail_on_rank_one, waiting) as ranks:
        assert all(event.wait(STARTED) for event in waiting)
        ranks.processes[0].join(SECONDS_TO_NOTICE)
        assert ranks.processes[0].exitcode == 1
        assert ranks.processes[1].is_alive()


def stop_when_requested(world: World, ready) -> tuple[bool, bool]:
    """Return whether a stop was requested before and after the signal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests were started with nohup
    stop, watchdog = watched(world)
    before = stop.requested()
    ready[world.rank].set()
    deadline = time.monotonic() + STARTED
    while not stop.requested() and time.monotonic() < deadline:
        signal.sigtimedwait([], 0.05)
    after = stop.requested()
    world.barrier()
    watchdog.close()
    return before, after


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_one_rank_is_seen_by_all(number):
    ready = [Ranks.context.Event() for _ in range(2)]
    with Ranks(in_process_group, 2, stop_when_requested, ready) as ranks:
        assert all(event.wait(STARTED) for event in ready)
        os.kill(ranks.processes[1].pid, number)
        assert ranks.results() == [(False, True), (False, True)]


def end_forked_children(world: World, number: signal.Signals) -> list[int]:
    """Signal forked children immediately after the fork. Return their exit codes."""
    stop = StopRequest(world.store)
    stop.listen()
    endings = []
    for _ in range(20):
        child = os.fork()
        if child == 0:
            time.sleep(STARTED)
            os._exit(0)
        os.kill(child, number)
        _, status = os.waitpid(child, 0)
        endings.append(os.waitstatus_to_exitcode(status))
    assert not stop.requested()
    os.kill(os.getpid(), number)
    assert stop.requested(), "the rank itself still handles the signal"
    return endings


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signals_end_forked_children_of_a_reward(number):
    assert run_on_ranks(end_forked_children, 1, number) == [[-number] * 20]


def stops_on_ignored_hangup(world: World) -> bool:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest(world.store)
    stop.listen()
    os.kill(os.getpid(), signal.SIGHUP)
    return stop.requested()


def test_a_rank_under_nohup_keeps_ignoring_hangups():
    assert run_on_ranks(stops_on_ignored_hangup, 1) == [False]


def handler_before_and_after_listening(world: World) -> list[object]:
    start = signal.signal(signal.SIGTERM, lambda number, frame: None)
    own = signal.getsignal(signal.SIGTERM)
    stop = StopRequest(world.store)
    made = signal.getsignal(signal.SIGTERM) is own
    stop.listen()
    listening = signal.getsignal(signal.SIGTERM) is not own
    signal.signal(signal.SIGTERM, start)
    return [made, listening]


def test_the_start_keeps_its_handlers_until_the_run_listens():
    assert run_on_ranks(handler_before_and_after_listening, 1) == [[True, True]]


def leave_one_after_the_other(world: World, first_has_left) -> int:
    """Let rank 1 close its watchdog after rank 0 has exited. Return 1 if a failure was recorded, else 0."""
    _, watchdog = watched(world)
    watchdog.close()
    world.barrier()
    if world.rank == 1:
        assert first_has_left.wait(STARTED)
    return int(world.store.check(["failed"]))


def test_ranks_that_exit_normally_are_not_reported_as_dead():
    first_has_left = Ranks.context.Event()
    with Ranks(in_process_group, 2, leave_one_after_the_other, first_has_left) as ranks:
        first_has_left.set()
        assert ranks.results() == [0, 0]
        for process in ranks.processes:
            process.join(STARTED)
        assert [process.exitcode for process in ranks.processes] == [0, 0]
