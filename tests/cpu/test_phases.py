"""Who owns the memory when: the order of every wake, write, offload and sleep, whatever happens in between."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import torch

from colocated_grpo import phases
from colocated_grpo.errors import RunError
from colocated_grpo.phases import Choreography, Clock
from colocated_grpo.summaries import rollout_metrics
from colocated_grpo.types import Group, Prompt, Rollout, Score
from tests.support.fakes import FakeEngine


class Offload:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def to_host(self) -> None:
        self._events.append("optimizer to host")

    def to_device(self) -> None:
        self._events.append("optimizer to device")


class FakePolicy:
    def __init__(self, events: list[str], *, offloads: bool) -> None:
        self.version = 0
        self.offload = Offload(events) if offloads else None


class Sync:
    def __init__(self, events: list[str], *, stale: bool) -> None:
        self._events = events
        self._stale = stale

    def sync(self) -> None:
        self._events.append("sync")
        if self._stale:
            raise RunError("stale")


class Stage:
    """A choreography over things that only write down what is asked of them."""

    def __init__(self, *, sync_frequency: int = 1, offloads: bool = False, stale: bool = False) -> None:
        self.events: list[str] = []
        self.policy = FakePolicy(self.events, offloads=offloads)
        self.engine = FakeEngine(events=self.events)
        self.clock = Clock(torch.device("cpu"))
        sync = Sync(self.events, stale=stale)
        self.choreography = Choreography(self.policy, self.engine, sync, self.clock, sync_frequency)

    def rollout(self, step: int, *, sync: bool = False) -> list[str]:
        """The events of one rollout phase."""
        self.events.clear()
        with self.choreography.rollout_phase(step, sync=sync):
            self.events.append("generate")
        return list(self.events)


SYNCED = [
    "wake weights",
    "sync",
    "weights changed 0",
    "wake kv_cache",
    "generate",
    "sleep",
]
NOT_SYNCED = ["wake weights", "wake kv_cache", "generate", "sleep"]


def test_weights_are_woken_and_written_before_the_cache_is_mapped():
    assert Stage().rollout(0) == SYNCED


def test_the_optimizer_is_offloaded_before_the_cache_is_mapped_and_returns_after_the_engine_sleeps():
    assert Stage(offloads=True).rollout(0) == [
        "wake weights",
        "sync",
        "weights changed 0",
        "optimizer to host",
        "wake kv_cache",
        "generate",
        "sleep",
        "optimizer to device",
    ]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_engine_sleeps_and_the_optimizer_returns_when_generation_fails(error):
    stage = Stage(offloads=True)
    with pytest.raises(error), stage.choreography.rollout_phase(0):
        stage.events.append("generate")
        raise error
    assert stage.events[-3:] == ["generate", "sleep", "optimizer to device"]


def test_weights_that_have_not_arrived_prevent_generation():
    stage = Stage(stale=True)
    with pytest.raises(RunError, match="stale"):
        stage.rollout(0)
    assert "generate" not in stage.events


def test_weights_are_written_every_sync_frequency_steps():
    stage = Stage(sync_frequency=3)
    assert [stage.rollout(step) == SYNCED for step in range(7)] == [True, False, False, True, False, False, True]
    assert stage.rollout(8) == NOT_SYNCED


def test_the_first_phase_of_a_resumed_run_writes_the_weights_whatever_the_step():
    stage = Stage(sync_frequency=4)
    assert [stage.rollout(step) == SYNCED for step in (2, 3, 4)] == [True, False, True]


def test_a_sync_can_be_requested_between_regular_syncs():
    stage = Stage(sync_frequency=100)
    stage.rollout(0)
    assert stage.rollout(50, sync=True) == SYNCED


def test_completions_carry_the_version_of_the_last_sync():
    stage = Stage(sync_frequency=2)
    versions = []
    for step in range(4):
        stage.policy.version = 10 * step
        versions += [event for event in stage.rollout(step) if event.startswith("weights changed")]
    assert versions == ["weights changed 0", "weights changed 20"]


def test_staleness_counts_optimizer_steps_since_the_weights_were_written():
    def group(version: int) -> Group:
        rollout = Rollout(
            token_ids=[1, 2],
            loss_mask=[False, True],
            sampling_logprobs=[0.0, -1.0],
            prompt_length=1,
            text="2",
            finish_reason="stop",
            policy_version=version,
            temperature=1.0,
            score=Score(reward=1.0),
        )
        return Group(prompt=Prompt(index=0, token_ids=[1], text="1", item={}, source="fake"), rollouts=[rollout])

    assert rollout_metrics([group(7)], 7)["staleness"] == 0
    assert rollout_metrics([group(4), group(7)], 8)["staleness"] == 2.5


def test_the_clock_adds_up_phases_between_two_readings_and_also_when_they_fail(monkeypatch):
    now = iter([10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = Clock(torch.device("cpu"))
    with clock.time("a"):
        pass
    with suppress(ValueError), clock.time("a"):
        raise ValueError
    clock.note_memory("a")
    row = clock.read()
    assert row == {"seconds/a": (12 - 10) + (23 - 20), "memory/a_gib": row["memory/a_gib"]}
    assert 0.9 * psutil.Process().memory_info().rss < row["memory/a_gib"] * 2**30 < psutil.virtual_memory().total
    assert clock.read() == {}


def test_a_step_is_measured_phase_by_phase():
    stage = Stage()
    stage.rollout(0)
    with stage.choreography.training_phase():
        pass
    seconds = {f"seconds/{name}" for name in ("wake", "sync", "sleep", "train")}
    assert stage.clock.read().keys() == seconds | {"memory/generate_gib", "memory/train_gib"}
