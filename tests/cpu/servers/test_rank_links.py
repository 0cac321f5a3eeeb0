"""Rank links: requests of rank 0 on the engine of another rank."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import AuthenticationError

import pytest

from colocated_grpo.rollout.engine import Request, Sampling, TokenDelta
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.rendezvous import own_address
from colocated_grpo.servers.rank_links import RankLink, RemoteInbox, link_ranks
from tests.support.fakes import FakeEngine, completion_of
from tests.support.ranks import run_on_ranks
from tests.support.servers import until

SAMPLING = Sampling(temperature=0.5, max_tokens=8, stop=("x",), stop_token_ids=(1, 2))
TIMEOUT = 120.0
FOREVER = 10**9
"""Decode steps."""


def request(seed: int) -> Request:
    return Request(key=("http", seed), token_ids=[1, 2, seed], seed=seed, sampling=SAMPLING)


class Pair:
    """Both ends of a link, and the engine behind the remote one."""

    def __init__(self) -> None:
        self.engine, inbox = FakeEngine(), Inbox()
        self.driver = Driver(self.engine, inbox)
        self.remote = RemoteInbox(inbox, "127.0.0.1", b"secret")
        self.link = RankLink(self.remote.address, b"secret")

    def serve(self, phase: int) -> threading.Thread:
        thread = threading.Thread(target=self.remote.serve, args=(self.driver, phase))
        thread.start()
        return thread

    def close(self) -> None:
        self.link.close()
        self.driver.abort()
        self.remote.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_completions_come_back_as_the_remote_engine_sampled_them(pair):
    pair.engine.weights_changed(3)
    futures = [pair.link.put(request(seed)) for seed in range(20)]
    thread = pair.serve(1)
    assert [future.result(TIMEOUT) for future in futures] == [completion_of(request(seed), 3) for seed in range(20)]
    assert pair.engine.submitted[0].sampling == SAMPLING
    pair.link.end_phase(1, abort=False)
    thread.join(TIMEOUT)
    assert not thread.is_alive()


def test_deltas_arrive_before_their_completion(pair):
    deltas: list[TokenDelta] = []
    future = pair.link.put(replace(request(1), stream=True), deltas.append)
    num_at_completion: list[int] = []
    future.add_done_callback(lambda _: num_at_completion.append(len(deltas)))
    thread = pair.serve(1)
    whole = future.result(TIMEOUT)
    pair.link.end_phase(1, abort=False)
    thread.join(TIMEOUT)
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids[:-1] != []
    assert all(isinstance(delta, TokenDelta) for delta in deltas)
    until(lambda: num_at_completion)  # the future has its result before its callbacks are called
    assert num_at_completion == [len(deltas)]


def test_running_requests_finish_when_a_phase_ends(pair):
    decoding, go_on = threading.Event(), threading.Event()
    pair.engine._on_step = lambda: (decoding.set(), go_on.wait(TIMEOUT))
    thread = pair.serve(1)
    future = pair.link.put(request(1))
    assert decoding.wait(TIMEOUT)
    pair.link.end_phase(1, abort=False)
    until(lambda: pair.remote.last_ended == 1)
    go_on.set()
    assert future.result(TIMEOUT) == completion_of(request(1))
    thread.join(TIMEOUT)


def test_requests_between_phases_are_served_in_the_next(pair):
    pair.link.end_phase(1, abort=False)
    pair.serve(1).join(TIMEOUT)
    future = pair.link.put(request(1))
    thread = pair.serve(2)
    assert future.result(TIMEOUT) == completion_of(request(1))
    pair.link.end_phase(2, abort=False)
    thread.join(TIMEOUT)


def test_an_aborted_phase_cancels_its_running_requests(pair):
    pair.engine._decode_steps = lambda request: FOREVER
    thread = pair.serve(1)
    future = pair.link.put(request(1))
    until(lambda: pair.engine.running)
    pair.link.end_phase(1, abort=True)
    thread.join(TIMEOUT)
    until(lambda: future.done())
    assert future.cancelled()


def test_a_cancelled_request_leaves_the_remote_engine(pair):
    pair.engine._decode_steps = lambda request: FOREVER
    thread = pair.serve(1)
    future = pair.link.put(request(1))
    until(lambda: pair.engine.running)
    future.cancel()
    until(lambda: not pair.engine.running)
    pair.link.end_phase(1, abort=False)
    thread.join(TIMEOUT)
    assert not thread.is_alive(), "a request still running would keep the phase from ending"


def test_requests_to_a_rank_that_has_ended_are_cancelled_without_an_error(pair, caplog):
    running = pair.link.put(request(1))
    pair.link.close()
    assert running.cancel()
    assert pair.link.put(request(2)).cancelled()
    assert not caplog.records, "an exception of a callback is only logged"


def test_a_connection_without_the_secret_is_closed_and_the_next_one_is_accepted():
    inbox = Inbox()
    remote = RemoteInbox(inbox, "127.0.0.1", b"secret")
    with pytest.raises(AuthenticationError):
        RankLink(remote.address, b"wrong")
    with socket.create_connection(remote.address) as silent, socket.create_connection(remote.address) as stranger:
        stranger.sendall(b"{}\n" * 200)
        link = RankLink(remote.address, b"secret")
        assert silent.fileno() > 0
    link.put(request(1))
    until(lambda: inbox)
    link.close()
    remote.close()


def test_the_own_address_is_the_one_on_the_route_to_the_peer():
    assert own_address("127.0.0.1") == "127.0.0.1"


def versions_from_every_rank(world: World) -> list[int] | None:
    """Send a request from rank 0 to each other rank, whose engine has its own rank as policy version."""
    inbox, engine = Inbox(), FakeEngine()
    engine.weights_changed(world.rank)
    links, remote = link_ranks(inbox, world)
    if remote is not None:
        remote.serve(Driver(engine, inbox), 1)
        return None
    versions = [link.put(request(1)).result(TIMEOUT).policy_version for link in links]
    for link in links:
        link.end_phase(1, abort=False)
    return versions


def test_rank_0_reaches_every_other_rank():
    assert run_on_ranks(versions_from_every_rank, 3)[0] == [1, 2]
