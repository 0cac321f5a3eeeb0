"""Requests from other threads: every future gets its own completion, and waiting costs nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from colocated_grpo.rollout import inbox as inbox_module
from colocated_grpo.rollout.engine import Request, Sampling, TokenDelta
from colocated_grpo.rollout.inbox import MAX_STEPS_QUEUED, Driver, Inbox
from colocated_grpo.types import Completion
from tests.support.fakes import FakeEngine, completion_of

SAMPLING = Sampling(temperature=1.0, max_tokens=9)


def request_of(key: Hashable, seed: int = 0) -> Request:
    return Request(key=key, token_ids=[1, 2], seed=seed, sampling=SAMPLING)


def drive(driver: Driver, until: threading.Event) -> None:
    while not until.is_set():
        assert driver.step() == []


def test_requests_from_many_threads_get_their_own_completions():
    inbox, done = Inbox(), threading.Event()
    driver = Driver(FakeEngine(), inbox)

    def client(number: int) -> list[tuple[Request, Completion]]:
        requests = [request_of(("client", number, turn), seed=100 * number + turn) for turn in range(20)]
        return [(request, inbox.put(request).result(120)) for request in requests]

    def clients() -> list[list[tuple[Request, Completion]]]:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(client, range(8)))
        done.set()
        inbox.wake()
        return answers

    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(clients)
        drive(driver, done)
    pairs = [pair for of_client in answers.result() for pair in of_client]
    assert len(pairs) == 160
    assert all(completion == completion_of(request) for request, completion in pairs)
    assert driver.running == 0


def test_requests_of_the_driver_are_returned_by_step_and_have_no_future():
    inbox = Inbox()
    driver = Driver(FakeEngine(decode_steps=lambda request: 2), inbox)
    driver.submit([request_of((0, 0), seed=5), request_of((0, 1), seed=6)])
    future = inbox.put(request_of("guest", seed=7))
    assert driver.step() == []
    assert driver.running == 3
    finished = dict(driver.step())
    assert finished.keys() == {(0, 0), (0, 1)}
    assert future.result(0) == completion_of(request_of("guest", seed=7))


def busy(engine: FakeEngine, inbox: Inbox, requests: int) -> Driver:
    """A driver whose own requests are under way for long."""
    driver = Driver(engine, inbox)
    driver.submit([request_of((0, sibling), seed=sibling) for sibling in range(requests)])
    driver.step()
    return driver


def steps_until_submitted(driver: Driver, engine: FakeEngine, requests: int) -> int:
    for steps in range(1, 1000):
        driver.step()
        if len(engine.submitted) == requests:
            return steps
        assert len(engine.submitted) < requests
    raise AssertionError(f"{len(engine.submitted)} requests after 1000 steps")


@pytest.mark.parametrize(("guests", "steps"), [(4, 30), (40, 3), (120, 1)])
def test_requests_are_admitted_when_free_slots_have_lost_as_many_steps_as_an_admission_costs(guests, steps):
    inbox, engine = Inbox(), FakeEngine(max_num_seqs=512, decode_steps=lambda request: 1000)
    driver = busy(engine, inbox, 40)  # to whom an entry costs three steps each
    for guest in range(guests):
        inbox.put(request_of(("guest", guest)))
    assert steps_until_submitted(driver, engine, 40 + guests) == steps


def test_queued_requests_are_admitted_together_and_the_count_starts_again():
    inbox, engine = Inbox(), FakeEngine(decode_steps=lambda request: 1000)
    driver = busy(engine, inbox, 20)
    for guest in range(4):
        inbox.put(request_of(("guest", guest)))
        driver.step()
    assert len(engine.submitted) == 20
    steps_until_submitted(driver, engine, 24)
    assert [request.key for request in engine.submitted[20:]] == [("guest", guest) for guest in range(4)]
    inbox.put(request_of("later"))
    driver.step()
    assert len(engine.submitted) == 24


def test_a_request_cancelled_while_queued_never_reaches_the_engine():
    inbox, engine = Inbox(), FakeEngine(decode_steps=lambda request: 1000)
    driver = busy(engine, inbox, 40)
    guest = inbox.put(request_of("guest"))
    driver.step()
    guest.cancel()
    for _ in range(2 * MAX_STEPS_QUEUED):
        driver.step()
    assert (len(engine.submitted), driver.running) == (40, 40)
    assert engine.events == []


def test_freed_slots_are_filled_together():
    steps = {(0, sibling): 2 + sibling for sibling in range(32)}  # one falls free with each step
    engine = FakeEngine(max_num_seqs=32, decode_steps=lambda request: steps.get(request.key, 100))
    driver = Driver(engine, Inbox())
    driver.submit([request_of((0, sibling)) for sibling in range(32)])
    driver.submit([request_of((1, sibling)) for sibling in range(4)])
    seated = []
    for _ in range(24):
        driver.step()
        seated.append(len(engine.submitted))
    # Seats lost to the line by then: 1 + 2 + 3, then four with each step; an entry costs three steps of those left.
    assert seated == [32] * 16 + [36] * 8


def test_a_queued_request_with_a_free_slot_is_admitted_after_max_steps_queued():
    engine = FakeEngine(max_num_seqs=64, decode_steps=lambda request: 1000)
    driver = busy(engine, Inbox(), 40)
    driver.submit([request_of((1, 0))])
    steps = 0
    while len(engine.submitted) == 40:
        driver.step()
        steps += 1
    assert steps == MAX_STEPS_QUEUED + 1


def test_queued_requests_of_the_driver_are_dropped_by_an_abort():
    engine = FakeEngine(max_num_seqs=2)
    driver = Driver(engine, Inbox())
    driver.submit([request_of((0, sibling)) for sibling in range(4)])
    driver.step()
    driver.abort()
    driver.submit([request_of((1, 0))])
    driver.step()
    assert [request.key for request in engine.submitted] == [(0, 0), (0, 1), (1, 0)]


@pytest.mark.parametrize("period", [2, 3, 9])
def test_requests_are_admitted_in_order_of_arrival_under_a_steady_load(period):
    # Two seats fall free together, every so many steps.
    engine, inbox = FakeEngine(max_num_seqs=16, decode_steps=lambda request: 2 + request.key[1] // 2 * period), Inbox()
    driver = Driver(engine, inbox)
    driver.submit([request_of((0, sibling)) for sibling in range(16)])
    driver.step()
    driver.submit([request_of(("own", 0))])
    guest = inbox.put(request_of(("guest", 0)))
    finished = []
    for wave in range(40 * period):
        if driver.running < 30:
            driver.submit([request_of((wave, sibling)) for sibling in range(4)])
            inbox.put(request_of(("crowd", wave)))
        finished += driver.step()
    assert guest.done()
    assert ("own", 0) in dict(finished)


def test_a_rejected_request_does_not_delay_the_next_one(monkeypatch):
    monkeypatch.setattr(inbox_module, "IDLE_SECONDS", 120.0)

    class Choosy(FakeEngine):
        def submit(self, requests):
            if any(request.key[0] == "bad" for request in requests):
                raise ValueError("too long")
            super().submit(requests)

    inbox = Inbox()
    driver = Driver(Choosy(max_num_seqs=2, decode_steps=lambda request: 1), inbox)
    refused = [inbox.put(request_of(("bad", number))) for number in range(5)]
    good = inbox.put(request_of(("good", 0)))
    while not good.done():
        driver.step()
    for future in refused:
        with pytest.raises(ValueError, match="too long"):
            future.result(0)
    assert driver.running == 0


def test_asyncio_waits_for_a_completion_with_wrap_future():
    inbox, done = Inbox(), threading.Event()
    driver = Driver(FakeEngine(), inbox)

    async def two_turns() -> list[Completion]:
        turns = [await asyncio.wrap_future(inbox.put(request_of(turn, seed=turn))) for turn in range(2)]
        done.set()
        inbox.wake()
        return turns

    with ThreadPoolExecutor(1) as pool:
        turns = pool.submit(asyncio.run, two_turns())
        drive(driver, done)
    assert turns.result() == [completion_of(request_of(turn, seed=turn)) for turn in range(2)]


def test_a_driver_without_work_sleeps_until_a_request_comes(monkeypatch):
    monkeypatch.setattr(inbox_module, "IDLE_SECONDS", 120.0)
    inbox = Inbox()
    driver = Driver(FakeEngine(decode_steps=lambda request: 1), inbox)
    asleep = threading.Event()
    wait = inbox.wait

    def noticed_wait(timeout: float) -> None:
        asleep.set()
        wait(timeout)

    inbox.wait = noticed_wait
    futures: list[Future[Completion]] = []

    def guest() -> None:
        asleep.wait(120)
        futures.append(inbox.put(request_of("late")))

    thread = threading.Thread(target=guest)
    thread.start()
    started, cpu = time.monotonic(), time.thread_time()
    assert driver.step() == []  # woken by the request
    assert driver.step() == []  # serves it
    assert time.monotonic() - started < 60
    assert time.thread_time() - cpu < 0.1
    thread.join()
    assert futures[0].result(0) == completion_of(request_of("late"))


def test_an_idle_step_returns_so_that_a_stop_request_is_seen(monkeypatch):
    monkeypatch.setattr(inbox_module, "IDLE_SECONDS", 0.01)
    assert Driver(FakeEngine(), Inbox()).step() == []


def test_a_wake_before_the_wait_is_not_lost(monkeypatch):
    monkeypatch.setattr(inbox_module, "IDLE_SECONDS", 120.0)
    inbox = Inbox()
    inbox.wake()
    started = time.monotonic()
    assert Driver(FakeEngine(), inbox).step() == []
    assert time.monotonic() - started < 60


def test_a_cancelled_request_leaves_the_engine_and_its_key_is_free_again():
    engine, inbox = FakeEngine(decode_steps=lambda request: 3), Inbox()
    driver = Driver(engine, inbox)
    first, stays = inbox.put(request_of("a", seed=1)), inbox.put(request_of("b", seed=2))
    driver.step()
    first.cancel()
    again = inbox.put(request_of("a", seed=3))
    driver.step()
    assert engine.events == ["abort ['a']"]
    while driver.running:
        driver.step()
    assert stays.result(0) == completion_of(request_of("b", seed=2))
    assert again.result(0) == completion_of(request_of("a", seed=3))


def test_cancelling_a_queued_request_leaves_a_running_one_with_the_same_key_alone():
    inbox = Inbox()
    driver = Driver(FakeEngine(decode_steps=lambda request: 3), inbox)
    running = inbox.put(request_of("a", seed=1))
    driver.step()
    inbox.put(request_of("a", seed=2)).cancel()
    while not running.done():
        driver.step()
    assert running.result(0) == completion_of(request_of("a", seed=1))


def test_a_request_cancelled_before_it_was_served_never_reaches_the_engine():
    engine, inbox = FakeEngine(), Inbox()
    driver = Driver(engine, inbox)
    inbox.put(request_of("a")).cancel()
    inbox.wake()
    assert driver.step() == []
    assert engine.submitted == []


def test_a_cancel_at_the_moment_of_completion_does_no_harm():
    inbox = Inbox()
    driver = Driver(FakeEngine(decode_steps=lambda request: 1, on_step=lambda: future.cancel()), inbox)
    future = inbox.put(request_of("a"))
    assert driver.step() == []
    assert future.cancelled()
    driver.submit([request_of("b")])
    assert [key for key, _ in driver.step()] == ["b"]
    assert driver.running == 0


def test_two_running_requests_cannot_have_the_same_key():
    inbox = Inbox()
    driver = Driver(FakeEngine(), inbox)
    first, second = inbox.put(request_of("a", seed=1)), inbox.put(request_of("a", seed=2))
    while driver.step() or not first.done():
        pass
    assert first.result(0) == completion_of(request_of("a", seed=1))
    with pytest.raises(ValueError, match="request key 'a' is already running"):
        second.result(0)


def streamed(key: Hashable, seed: int = 0) -> Request:
    return replace(request_of(key, seed), stream=True)


def test_a_listener_receives_each_delta_of_its_own_request_but_the_last():
    inbox = Inbox()
    engine = FakeEngine()
    driver = Driver(engine, inbox)
    heard: dict[str, list[TokenDelta]] = {"a": [], "b": []}
    futures = {key: inbox.put(streamed(key, seed), heard[key].append) for key, seed in (("a", 4), ("b", 8))}
    silent = inbox.put(request_of("c", 3))
    while not (silent.done() and all(future.done() for future in futures.values())):
        driver.step()
    for key, future in futures.items():
        whole = future.result(0)
        assert len(whole.token_ids) > 2
        assert [token for piece in heard[key] for token in piece.token_ids] == whole.token_ids[:-1]
        assert [x for piece in heard[key] for x in piece.sampling_logprobs] == whole.sampling_logprobs[:-1]


def test_without_listeners_deltas_are_not_read(monkeypatch):
    monkeypatch.setattr(FakeEngine, "deltas", lambda engine: pytest.fail("on the path of every step"))
    inbox = Inbox()
    driver = Driver(FakeEngine(), inbox)
    future = inbox.put(request_of("a", 4))
    while not future.done():
        driver.step()
    assert future.result(0) == completion_of(request_of("a", 4))


def test_the_listener_of_a_cancelled_request_is_not_called_again():
    inbox = Inbox()
    driver = Driver(FakeEngine(), inbox)
    heard: list[TokenDelta] = []
    future = inbox.put(streamed("a", 4), heard.append)
    driver.step()
    future.cancel()
    again = inbox.put(request_of("a", 4))
    while not again.done():
        driver.step()
    assert len(heard) == 1


class Picky(FakeEngine):
    def submit(self, requests):
        for request in requests:
            if len(request.token_ids) > 2:
                raise ValueError("3 tokens are too many")
            super().submit([request])


def test_a_rejected_request_affects_only_its_sender():
    inbox = Inbox()
    driver = Driver(Picky(decode_steps=lambda request: 1), inbox)
    long = Request(key="long", token_ids=[1, 2, 3], seed=0, sampling=SAMPLING)
    refused, served = inbox.put(long), inbox.put(request_of("short"))
    driver.step()
    with pytest.raises(ValueError, match="3 tokens are too many"):
        refused.result(0)
    assert served.result(0) == completion_of(request_of("short"))
    assert driver.running == 0


def test_an_abort_cancels_running_and_queued_requests_and_later_ones_are_served():
    engine, inbox = FakeEngine(decode_steps=lambda request: 9), Inbox()
    driver = Driver(engine, inbox)
    running = inbox.put(request_of("running"))
    driver.submit([request_of((0, 0))])
    driver.step()
    waiting = inbox.put(request_of("waiting"))
    driver.abort()
    for future in (running, waiting):
        with pytest.raises(CancelledError):
            future.result(0)
    assert driver.running == 0 and not engine.running
    later = inbox.put(request_of("running", seed=4))
    while not later.done():
        driver.step()
    assert later.result(0) == completion_of(request_of("running", seed=4))
    assert engine.events == ["abort"]


def test_draining_finishes_running_requests_and_keeps_new_ones_queued():
    engine, inbox = FakeEngine(decode_steps=lambda request: 5), Inbox()
    driver = Driver(engine, inbox)
    under_way, given_up = inbox.put(request_of("under way")), inbox.put(request_of("given up"))
    driver.step()
    given_up.cancel()
    waits = inbox.put(request_of("waits"))
    driver.drain()
    assert under_way.result(0) == completion_of(request_of("under way"))
    assert not waits.done() and driver.running == 0 and not engine.running
    while not waits.done():
        driver.step()
    assert waits.result(0) == completion_of(request_of("waits"))
