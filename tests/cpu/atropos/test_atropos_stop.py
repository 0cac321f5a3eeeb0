"""Stop and resume of a run on Atropos: no batch received from the server is lost or trained twice."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from colocated_grpo.atropos import supply as supply_module
from colocated_grpo.atropos.reader import Origin
from colocated_grpo.atropos.supply import MainSupply
from colocated_grpo.rollout.collect import Stopped
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.runtime.distributed import World
from colocated_grpo.servers.rank_links import LoadBalancer
from tests.support.atropos_source import SourceHarness, post_group
from tests.support.fakes import FakeEngine
from tests.support.servers import EMBEDDED, ApiProcess, until


class Run:
    """The supply of a single rank over a fake engine, built and resumed in the order of a run."""

    def __init__(self, world: World, url: str, state: Any = None) -> None:
        self.harness = SourceHarness(url)
        self.stop = threading.Event()
        self.engine = FakeEngine()
        inbox = Inbox()
        self.supply = MainSupply(
            world,
            Driver(self.engine, inbox),
            self.stop.is_set,
            lambda: None,
            source=self.harness.source,
            inbox=inbox,
            rank_links=[],
            engines=LoadBalancer(inbox),
            policy_version=lambda: 0,
            note=self.harness.notes.append,
        )
        self.harness.source.fetch(0)
        if state is not None:
            self.supply.load_state_dict(state)

    def train_batch(self, step: int = 0) -> list[int]:
        """Take a step's groups, mark them as trained and return their first tokens. Raises Stopped after 120 s."""
        timeout = threading.Timer(120, self.stop.set)
        timeout.start()
        groups = self.supply.order(step)()
        timeout.cancel()
        self.supply.settle(groups)
        return [group.rollouts[0].token_ids[0] for group in groups]

    def close(self) -> Any:
        """Return the state as restored from a checkpoint."""
        state = json.loads(json.dumps(self.supply.state_dict()))
        self.supply.close()
        return state


def test_a_batch_that_arrives_during_a_stop_is_trained_by_the_resumed_run(world, url, monkeypatch):
    monkeypatch.setattr(supply_module, "LAST_BATCH_SECONDS", 120.0)
    run = Run(world, url)
    fetch = run.harness.client.batch

    def fetch_during_a_stop() -> list[Any] | None:
        items = fetch()
        if items is not None:
            run.stop.set()
            until(lambda: run.engine.events == ["abort"])
        return items

    run.harness.client.batch = fetch_during_a_stop
    post_group(url, 5)
    with pytest.raises(Stopped):
        run.supply.order(0)()
    resumed = Run(world, url, run.close())
    post_group(url, 6)
    assert [resumed.train_batch(), resumed.train_batch(1)] == [[5], [6]]
    resumed.close()


def test_a_batch_received_with_the_registration_survives_a_stop_before_the_first_step(world, url):
    Run(world, url).close()
    post_group(url, 5)
    run = Run(world, url)
    run.stop.set()
    with pytest.raises(Stopped):
        run.supply.order(0)()
    post_group(url, 6)
    state = run.close()
    resumed = Run(world, url, state)
    resumed.stop.set()  # stopped again, now with two batches received
    resumed = Run(world, url, resumed.close())
    assert [resumed.train_batch(), resumed.train_batch(1)] == [[5], [6]]
    resumed.close()


def test_groups_served_before_a_stop_keep_their_temperature_and_policy_version(world, url):
    run = Run(world, url)
    run.harness.origins.remember([5], [7, 9], Origin(0.8, 3, "length"))
    resumed = Run(world, url, run.close())
    post_group(url, 5)
    (group,) = resumed.supply.order(0)()
    resumed.supply.settle([group])
    assert {(one.temperature, one.policy_version, one.finish_reason) for one in group.rollouts} == {(0.8, 3, "length")}
    assert resumed.harness.source.metrics()["atropos/unknown_origin"] == 0
    resumed.close()


def test_a_trained_batch_is_not_trained_again(world, url):
    run = Run(world, url)
    post_group(url, 5)
    assert run.train_batch() == [5]
    resumed = Run(world, url, run.close())
    post_group(url, 6)
    assert resumed.train_batch() == [6]
    resumed.close()


def test_a_batch_in_the_checkpoint_is_trained_without_the_server(world):
    with ApiProcess(EMBEDDED) as server:
        Run(world, server.url).close()
        post_group(server.url, 5)
        state = Run(world, server.url).close()
    resumed = Run(world, server.url, state)
    assert resumed.train_batch() == [5]
    resumed.close()


def test_a_server_that_does_not_respond_does_not_delay_a_stop(world, url, monkeypatch):
    monkeypatch.setattr(supply_module, "LAST_BATCH_SECONDS", 0.01)
    run = Run(world, url)
    responded = threading.Event()

    def hang() -> None:
        run.stop.set()
        responded.wait(120)

    run.harness.client.batch = hang
    with pytest.raises(Stopped):
        run.supply.order(0)()
    assert "did not answer" in run.harness.notes[-1]
    responded.set()
    run.close()
