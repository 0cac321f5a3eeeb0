"""A run on Atropos that is stopped and resumed: no batch that it took from the server is lost."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from colocated_grpo.atropos import supply as supply_module
from colocated_grpo.atropos.supply import MainServing, ServedSupply
from colocated_grpo.rollout.collect import Stopped
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.runtime.distributed import World
from colocated_grpo.serving.load_balancer import LeastBusy
from colocated_grpo.serving.origins import Origin
from tests.support.atropos_trial import Trial, send
from tests.support.fakes import FakeEngine
from tests.support.servers import EMBEDDED, ApiProcess, until


class Run:
    """What a rank has for Atropos, made and resumed in the order of the run, over a fake engine."""

    def __init__(self, world: World, url: str, state: Any = None) -> None:
        self.trial = Trial(url)
        self.stop = threading.Event()
        self.engine = FakeEngine()
        inbox = Inbox()
        role = MainServing(
            self.trial.source,
            Driver(self.engine, inbox),
            inbox,
            [],
            LeastBusy([]),
            [],
            self.stop.is_set,
            lambda: 0,
            self.trial.notes.append,
        )
        self.supply = ServedSupply(role, world, self.stop.is_set, [1])
        self.trial.source.begin(0)
        if state is not None:
            self.supply.load_state_dict(state)

    def marks(self, step: int = 0) -> list[int]:
        """First tokens of a step's groups, which are then trained. Raises Stopped where none come."""
        patience = threading.Timer(10, self.stop.set)
        patience.start()
        groups = self.supply.order(step).collect()
        patience.cancel()
        self.supply.settle(groups)
        return [group.rollouts[0].token_ids[0] for group in groups]

    def close(self) -> Any:
        """Its state, as a checkpoint keeps it."""
        state = json.loads(json.dumps(self.supply.state_dict()))
        self.supply.close()
        return state


def test_a_batch_that_is_on_its_way_when_a_stop_is_asked_for_is_trained_by_the_resumed_run(world, url):
    run = Run(world, url)
    fetch = run.trial.client.batch

    def fetch_during_a_stop() -> list[Any] | None:
        items = fetch()
        if items is not None:
            run.stop.set()
            until(lambda: run.engine.events == ["abort"])
        return items

    run.trial.client.batch = fetch_during_a_stop
    send(url, 5)
    with pytest.raises(Stopped):
        run.supply.order(0).collect()
    resumed = Run(world, url, run.close())
    send(url, 6)
    assert [resumed.marks(), resumed.marks(1)] == [[5], [6]]
    resumed.close()


def test_a_batch_that_came_with_the_registration_outlasts_a_stop_before_the_first_step(world, url):
    Run(world, url).close()
    send(url, 5)
    run = Run(world, url)
    run.stop.set()
    with pytest.raises(Stopped):
        run.supply.order(0).collect()
    send(url, 6)
    state = run.close()
    resumed = Run(world, url, state)
    resumed.stop.set()  # stopped again, with two batches taken
    resumed = Run(world, url, resumed.close())
    assert [resumed.marks(), resumed.marks(1)] == [[5], [6]]
    resumed.close()


def test_groups_that_were_served_before_a_stop_keep_their_temperature_and_version(world, url):
    run = Run(world, url)
    run.trial.origins.remember([5], [7, 9], Origin(0.8, 3, "length"))
    resumed = Run(world, url, run.close())
    send(url, 5)
    (group,) = resumed.supply.order(0).collect()
    resumed.supply.settle([group])
    assert {(one.temperature, one.policy_version, one.finish_reason) for one in group.rollouts} == {(0.8, 3, "length")}
    assert resumed.trial.source.metrics()["atropos/unknown_origin"] == 0
    resumed.close()


def test_a_batch_that_was_trained_is_not_trained_again(world, url):
    run = Run(world, url)
    send(url, 5)
    assert run.marks() == [5]
    resumed = Run(world, url, run.close())
    send(url, 6)
    assert resumed.marks() == [6]
    resumed.close()


def test_a_batch_that_was_kept_is_trained_although_the_server_is_gone(world):
    with ApiProcess(EMBEDDED) as server:
        Run(world, server.url).close()
        send(server.url, 5)
        state = Run(world, server.url).close()
    resumed = Run(world, server.url, state)
    assert resumed.marks() == [5]
    resumed.close()


def test_a_server_that_does_not_answer_does_not_keep_a_run_from_stopping(world, url, monkeypatch):
    monkeypatch.setattr(supply_module, "LAST_ANSWER_SECONDS", 0.01)
    run = Run(world, url)
    answered = threading.Event()

    def hang() -> None:
        run.stop.set()
        answered.wait(30)

    run.trial.client.batch = hang
    with pytest.raises(Stopped):
        run.supply.order(0).collect()
    assert "did not answer" in run.trial.notes[-1]
    answered.set()
    run.close()
