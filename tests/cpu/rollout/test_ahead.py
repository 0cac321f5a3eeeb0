"""Sampling one step ahead: what is sampled when, where a resumed run goes on, and how a stop ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from colocated_grpo.environments.base import BatchResult
from colocated_grpo.rollout.collect import Gather, Stopped
from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.rollout.prompt_queue import Job
from colocated_grpo.rollout.supply import AheadSupply, Order
from colocated_grpo.types import Group, Prompt

STEPS = 4


class Prompts:
    """A `PromptSupply` of one prompt a step, whose sampling waits for `sampled`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.position = 0
        self.goal: int | None = None
        self.stopped = False
        self.sampled = threading.Event()
        self.sampled.set()
        self.error: Exception | None = None
        self._before: int | None = None
        self.collector = SimpleNamespace(world=SimpleNamespace(barrier=lambda: self.events.append("ranks")))

    def job(self, step: int) -> Job:
        if self.stopped:
            raise Stopped
        self._before, self.position = self.position, self.position + 1
        self.events.append(f"draw {step}")
        prompts = [Prompt(index=self._before, token_ids=[self._before], text="", item={}, source="s")]
        return Job(name=f"{step}", prompts=prompts, group_size=1, sampling=Sampling(temperature=1.0, max_tokens=1))

    def sample(self, job: Job) -> Gather:
        assert self.sampled.wait(timeout=120)
        self.events.append(f"sample {job.name}")
        if self.error is not None:
            raise self.error
        return lambda: self._gather(job)

    def _gather(self, job: Job) -> list[Group]:
        if self.stopped:
            raise Stopped
        self.events.append(f"gather {job.name}")
        return [Group(prompt=job.prompts[0], rollouts=[])]

    def order(self, step: int) -> Order:
        job = self.job(step)
        return lambda: self.sample(job)()

    def settle(self, groups: list[Group]) -> BatchResult:
        self._before = None
        [group] = groups
        self.events.append(f"settle {group.prompt.index}")
        return BatchResult(trained_now=[0], finished=group.prompt.index == self.goal)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position if self._before is None else self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@pytest.fixture
def prompts() -> Prompts:
    return Prompts()


def ahead_of(prompts: Any) -> AheadSupply:
    return AheadSupply(prompts, STEPS)


def train(
    supply: AheadSupply, prompts: Prompts, steps: range, saved: Callable[[int], None] = lambda step: None
) -> None:
    for step in steps:
        order = supply.order(step)
        prompts.events.append(f"sync {step}")
        groups = order()
        assert [group.prompt.token_ids for group in groups] == [[step]]
        supply.settle(groups)
        prompts.events.append(f"train {step}")
        saved(step)


def test_a_step_is_sampled_while_the_one_before_trains(prompts):
    supply = ahead_of(prompts)
    groups = supply.order(0)()
    prompts.sampled.clear()
    supply.settle(groups)
    assert prompts.events == ["draw 0", "sample 0", "gather 0", "settle 0", "draw 1"]  # and step 0 may train
    prompts.sampled.set()
    train(supply, prompts, range(1, STEPS))
    for step in range(1, STEPS):
        places = [prompts.events.index(f"{event} {step}") for event in ("draw", "sample", "gather", "sync", "train")]
        assert places == sorted(places)
    assert f"draw {STEPS}" not in prompts.events  # there is no step after the last


def test_a_checkpoint_has_the_position_before_prompts_that_are_sampled_ahead(prompts):
    positions: list[int] = []
    train(ahead_of(prompts), prompts, range(STEPS), lambda step: positions.append(prompts.state_dict()["position"]))
    assert positions == [1, 2, 3, 4]
    resumed = Prompts()
    supply = ahead_of(resumed)
    supply.load_state_dict({"position": 2})
    order = supply.order(2)
    assert supply.state_dict() == {"position": 2}
    assert [group.prompt.token_ids for group in order()] == [[2]]


def test_nothing_is_sampled_after_the_goal(prompts):
    prompts.goal = 1
    train(ahead_of(prompts), prompts, range(2))
    assert prompts.events[-2:] == ["settle 1", "train 1"]


def test_a_stop_before_the_draw_lets_the_step_be_trained_first(prompts):
    supply = ahead_of(prompts)
    order = supply.order(0)
    groups = order()
    prompts.stopped = True
    assert supply.settle(groups).trained_now == [0]
    assert supply.state_dict() == {"position": 1}
    with pytest.raises(Stopped):
        supply.order(1)


def test_a_stop_while_sampling_discards_the_step_and_keeps_its_position(prompts):
    supply = ahead_of(prompts)
    prompts.sampled.set()
    supply.settle(supply.order(0)())
    prompts.stopped = True
    with pytest.raises(Stopped):
        supply.order(1)
    assert supply.state_dict() == {"position": 1}


def test_an_error_while_sampling_is_raised_by_the_next_step(prompts):
    supply = ahead_of(prompts)
    groups = supply.order(0)()
    prompts.error = RuntimeError("the engine is gone")
    supply.settle(groups)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        supply.order(1)


def test_the_engine_is_free_once_all_ranks_have_sampled_a_step_that_is_not_trained(prompts):
    supply = ahead_of(prompts)
    groups = supply.order(0)()
    prompts.sampled.clear()
    supply.settle(groups)
    released = threading.Thread(target=supply.release_engine)
    released.start()
    assert prompts.events[-1] == "draw 1"
    prompts.sampled.set()
    released.join()
    assert prompts.events[-2:] == ["sample 1", "ranks"]
    assert supply.state_dict() == {"position": 1}, "a resumed run draws the prompts again"
    supply.release_engine()
    assert prompts.events[-2:] == ["sample 1", "ranks"]
