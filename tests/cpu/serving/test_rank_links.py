"""Requests of rank 0 on the engine of another rank."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from colocated_grpo.atropos.supply import RankServing
from colocated_grpo.rollout.engine import Request, Sampling, TokenDelta
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.runtime.distributed import World
from colocated_grpo.serving.rank_links import Link, LinkedInbox, link_ranks, own_address
from tests.support.fakes import FakeEngine, completion_of
from tests.support.ranks import run_on_ranks
from tests.support.servers import until

SAMPLING = Sampling(temperature=0.5, max_tokens=8, stop=("x",), stop_token_ids=(1, 2))


def request(seed: int) -> Request:
    return Request(key=("http", seed), token_ids=[1, 2, seed], seed=seed, sampling=SAMPLING)


class Pair:
    """Both ends, and the engine behind the far one."""

    def __init__(self) -> None:
        self.inbox, self.engine = Inbox(), FakeEngine()
        self.end = LinkedInbox(self.inbox, "127.0.0.1", "secret")
        self.link = Link(self.end.address, "secret")
        self.serving = RankServing(Driver(self.engine, self.inbox), self.end)

    def close(self) -> None:
        self.link.close()
        self.serving.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def serve(pair: Pair, phase: int) -> threading.Thread:
    thread = threading.Thread(target=pair.serving.serve, args=(phase,))
    thread.start()
    return thread


def test_completions_come_back_as_the_far_engine_sampled_them(pair):
    pair.engine.weights_changed(3)
    futures = [pair.link.put(request(seed)) for seed in range(20)]
    thread = serve(pair, 0)
    assert [future.result(10) for future in futures] == [completion_of(request(seed), 3) for seed in range(20)]
    assert pair.engine.submitted[0].sampling == SAMPLING
    pair.link.end_phase(1, abort=False)
    thread.join(10)
    assert not thread.is_alive()


def test_pieces_travel_ahead_of_their_completion(pair):
    heard: list[TokenDelta] = []
    future = pair.link.put(replace(request(1), stream=True), heard.append)
    heard_at_the_end: list[int] = []
    future.add_done_callback(lambda _: heard_at_the_end.append(len(heard)))
    thread = serve(pair, 0)
    whole = future.result(10)
    pair.link.end_phase(1, abort=False)
    thread.join(10)
    assert [token for piece in heard for token in piece.token_ids] == whole.token_ids[:-1] != []
    assert all(isinstance(piece, TokenDelta) for piece in heard)
    assert heard_at_the_end == [len(heard)]


def test_the_end_of_a_phase_lets_finish_what_is_under_way(pair):
    decoding, go_on = threading.Event(), threading.Event()
    pair.engine._on_step = lambda: (decoding.set(), go_on.wait(10))
    thread = serve(pair, 0)
    future = pair.link.put(request(1))
    assert decoding.wait(10)
    pair.link.end_phase(1, abort=False)
    until(lambda: pair.end.ended(1))
    go_on.set()
    assert future.result(10) == completion_of(request(1))
    thread.join(10)


def test_what_comes_between_phases_waits_for_the_next(pair):
    pair.link.end_phase(1, abort=False)
    serve(pair, 0).join(10)
    future = pair.link.put(request(1))
    thread = serve(pair, 1)
    assert future.result(10) == completion_of(request(1))
    pair.link.end_phase(2, abort=False)
    thread.join(10)


def test_a_stop_gives_up_what_is_under_way(pair):
    pair.engine._decode_steps = lambda request: 10**9
    thread = serve(pair, 0)
    future = pair.link.put(request(1))
    until(lambda: pair.engine.running)
    pair.link.end_phase(1, abort=True)
    thread.join(10)
    until(lambda: future.done())
    assert future.cancelled()


def test_a_cancelled_request_leaves_the_far_engine(pair):
    pair.engine._decode_steps = lambda request: 10**9
    thread = serve(pair, 0)
    future = pair.link.put(request(1))
    until(lambda: pair.engine.running)
    future.cancel()
    until(lambda: not pair.engine.running)
    pair.link.end_phase(1, abort=False)
    thread.join(10)
    assert not thread.is_alive(), "an engine that still decoded it would never come to its end"


def test_a_stranger_is_turned_away_and_does_not_take_the_place():
    inbox = Inbox()
    end = LinkedInbox(inbox, "127.0.0.1", "secret")
    for guess in (b"wrong\n", b"secre\n", b"{}\n" * 200):
        with socket.create_connection(end.address) as stranger:
            stranger.sendall(guess)
            assert stranger.recv(10) == b""
    link = Link(end.address, "secret")
    link.put(request(1))
    until(lambda: inbox)
    link.close()
    end.close()


def test_ranks_listen_on_the_way_to_the_first_one():
    assert own_address("127.0.0.1") == "127.0.0.1"


def sampled_everywhere(world: World) -> list[int] | None:
    """Rank 0 sends a request to each other rank, which answers with its own rank as policy version."""
    inbox, engine = Inbox(), FakeEngine()
    engine.weights_changed(world.rank)
    links, end = link_ranks(inbox, world)
    if end is not None:
        RankServing(Driver(engine, inbox), end).serve(0)
        return None
    versions = [link.put(request(1)).result(30).policy_version for link in links]
    for link in links:
        link.end_phase(1, abort=False)
    return versions


def test_rank_0_reaches_every_other_rank():
    assert run_on_ranks(sampled_everywhere, 3)[0] == [1, 2]
