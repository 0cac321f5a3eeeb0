"""The group of a trainer and its engine servers: all members meet in it, or those that are missing are named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from colocated_grpo.errors import RunError
from colocated_grpo.runtime import rendezvous
from colocated_grpo.runtime.processes import bind_store
from colocated_grpo.runtime.rendezvous import connect_store, serve_store
from colocated_grpo.servers.broadcast import BroadcastSync, JoinedGroup, MissingMembers
from colocated_grpo.servers.control_routes import Offer
from colocated_grpo.servers.engine_servers import EngineServer
from tests.support.ranks import single_rank_world
from tests.support.servers import until
from tests.support.trainer_server import TrainerServer

HERE = "127.0.0.1"
PATIENT = 30.0
CPU = torch.device("cpu")


@pytest.fixture
def meeting(monkeypatch) -> Callable[[int], None]:
    """Return a function after which as many members join, and none waits before all of them are there, nor then."""

    def meeting(present: int) -> None:
        here, wait_for_keys = threading.Barrier(present), rendezvous.wait_for_keys

        def wait(store: Any, keys: Sequence[str], deadline: float) -> list[str]:
            here.wait(10 * PATIENT)
            return wait_for_keys(store, keys, deadline - PATIENT)

        monkeypatch.setattr(rendezvous, "wait_for_keys", wait)

    return meeting


def joining(present: int, size: int) -> list[Future[JoinedGroup]]:
    """Let the first `present` of `size` members join, each with a connection of its own to the store."""
    store = serve_store(bind_store(HERE, 0), PATIENT)
    stores = [store, *[connect_store(HERE, store.port, PATIENT) for _ in range(present - 1)]]
    with ThreadPoolExecutor(present) as threads:
        return [threads.submit(JoinedGroup, each, rank, size, CPU, PATIENT) for rank, each in enumerate(stores)]


def test_members_that_are_all_there_receive_the_values_of_rank_0():
    groups = [member.result() for member in joining(present=3, size=3)]
    values = [torch.full([4], float(rank + 7)) for rank in range(3)]
    for work in [group.broadcast(value) for group, value in zip(groups, values, strict=True)]:
        work.wait()
    assert torch.stack(values).tolist() == [[7.0] * 4] * 3
    for group in groups:
        group.close()


@pytest.mark.parametrize(("size", "missing"), [(3, "rank 2 of 3"), (4, "ranks 2, 3 of 4")])
def test_a_member_that_never_joins_ends_the_wait_of_the_others_and_is_named(meeting, size, missing):
    meeting(2)
    for member in joining(present=2, size=size):
        error = member.exception()
        assert isinstance(error, MissingMembers)
        assert str(error) == f"{missing} did not join within 30 s"
        assert error.ranks == list(range(2, size))


class OfferedServer(TrainerServer):
    """An engine server over a fake engine, whose answer to a trainer's offer is given."""

    def __init__(self, join: Callable[[Offer], Any], ranks: int) -> None:
        self._join, self._ranks = join, ranks
        super().__init__()

    def _add_routes(self, app: Any, facts: dict[str, Any]) -> None:
        super()._add_routes(app, facts | {"device": "cpu", "tensor_parallel_size": self._ranks})

    def call(self, name: str, *arguments: Any) -> Any:
        return self._join(*arguments)


def join(offer: Offer) -> None:
    """Join as `WeightReceiver` does, whose errors the server notes."""
    store = connect_store(offer.address, offer.port, PATIENT)
    try:
        JoinedGroup(store, offer.first_rank, offer.group_size, CPU, offer.timeout)
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def die(offer: Offer) -> None:
    """Do not join after the offer was accepted, as a process that has died in between."""


def test_a_server_that_accepts_an_offer_and_does_not_join_ends_the_run_with_its_url(meeting):
    meeting(2)
    with OfferedServer(join, ranks=1) as first, OfferedServer(die, ranks=2) as second:
        servers = [EngineServer(server.url, None, "trainer", PATIENT) for server in (first, second)]
        sync = BroadcastSync({"model.norm.weight": torch.ones(4)}, "model", servers, single_rank_world(), 1)
        with pytest.raises(RunError) as raised:
            sync.sync()
        until(lambda: "ranks 2, 3 of 4 did not join within 30 s" in first.notes)
    assert str(raised.value) == (
        f"engine.urls={second.url}: did not join the weight sync within engine.server_timeout=30 s; "
        "look into the log of the server"
    )
