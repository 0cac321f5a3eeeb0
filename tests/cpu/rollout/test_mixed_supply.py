"""Prompts of the run and groups from outside in one batch: neither side waits for the other, and both stay apart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from colocated_grpo.atropos import supply
from colocated_grpo.atropos.supply import MainSupply, WorkerSupply
from colocated_grpo.environments.base import BatchResult, EnvironmentSetupError
from colocated_grpo.rollout.collect import Collector, Stopped
from colocated_grpo.rollout.engine import Request, Sampling
from colocated_grpo.rollout.episodes import EpisodeRunner
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.prompt_queue import static_dispatch
from colocated_grpo.rollout.supply import MixedSupply, PromptSupply
from colocated_grpo.runtime.distributed import World
from colocated_grpo.servers.rank_links import LoadBalancer, link_ranks
from colocated_grpo.settings.generation import RolloutConfig
from colocated_grpo.types import Completion, Group, Prompt, Rollout, Score
from tests.support.fakes import FakeEngine, completion_of
from tests.support.ranks import run_on_ranks, single_rank_group

SAMPLING = Sampling(temperature=1.0, max_tokens=6)
PROMPTS, GROUP = 4, 2


def asked(seed: int) -> Request:
    """A request of an environment."""
    return Request(key=("http", seed), token_ids=[1, 2], seed=seed, sampling=SAMPLING)


class Prompts:
    """A source of prompts that holds the last group of each step back for one step, and counts what it gave."""

    def __init__(self) -> None:
        self.given = 0
        self.recorded: list[list[Group]] = []
        self.late: list[Group] = []

    def next(self, n: int) -> list[Prompt]:
        first, self.given = self.given, self.given + n
        return [
            Prompt(index=first + i, token_ids=[3, i], text=f"p{first + i}", item={}, source="own") for i in range(n)
        ]

    def record(self, groups: Sequence[Group]) -> BatchResult:
        self.recorded.append(list(groups))
        late, self.late = self.late, [groups[-1]]
        return BatchResult(trained_now=list(range(len(groups) - 1)), released=late, metrics={"own": 1.0})

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Outside:
    """In the place of `AtroposSource`: an environment that samples with `ask` and posts one group of it a step."""

    def __init__(self, ask: Callable[[], list[Completion]]) -> None:
        self._ask = ask
        self.read = 0
        self.taken: list[int] = []
        self.end = threading.Event()

    def wait_for_groups(self, step: int, policy_version: int, stop: threading.Event) -> list[Group] | None:
        self.end = stop
        rollouts = [_rollout(completion) for completion in self._ask()]
        prompt = Prompt(index=self.read, token_ids=[1, 2], text="", item={}, source="atropos")
        self.taken.append(self.read)
        return [Group(prompt=prompt, rollouts=rollouts)]

    def settle(self) -> None:
        self.taken.clear()
        self.read += 1

    def metrics(self) -> dict[str, float]:
        return {"outside": 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read, "taken": list(self.taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


def _rollout(completion: Completion) -> Rollout:
    return Rollout(
        token_ids=[1, 2, *completion.token_ids],
        loss_mask=[False] * 2 + [True] * len(completion.token_ids),
        sampling_logprobs=[0.0] * 2 + completion.sampling_logprobs,
        prompt_length=2,
        text="",
        finish_reason=completion.finish_reason,
        policy_version=0,
        temperature=1.0,
        score=Score(reward=0.0),
    )


class Judge:
    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        return [Score(reward=1.0) for _ in completions]


class Both:
    """A rank's whole supply over a fake engine, made as the run makes it."""

    def __init__(
        self,
        world: World,
        engine: FakeEngine,
        stop_requested: Callable[[], bool],
        ask: Callable[[Both], list[Completion]],
    ) -> None:
        self.inbox, self.engine = Inbox(), engine
        self.links, end = link_ranks(self.inbox, world)
        driver = Driver(engine, self.inbox)
        collector = Collector(
            driver,
            EpisodeRunner({}, None, self.inbox, seed=0, tool_timeout=1.0),
            {"own": Judge()},
            lambda tokens: "",
            world,
            static_dispatch(world.rank, world.size),
            seed=0,
            reward_workers=1,
            reward_timeout=120.0,
            stop_requested=stop_requested,
        )
        self.prompts = Prompts()
        config = RolloutConfig(prompts_per_step=PROMPTS, group_size=GROUP)
        sampled = PromptSupply(self.prompts if world.is_main else None, collector, config, replace(SAMPLING))
        self.outside = Outside(lambda: ask(self))
        self.notes: list[str] = []
        if end is None:
            served: Any = MainSupply(
                world,
                driver,
                stop_requested,
                lambda: [link.close() for link in self.links],
                source=self.outside,
                inbox=self.inbox,
                rank_links=self.links,
                engines=LoadBalancer(self.inbox, self.links),
                policy_version=lambda: 0,
                note=self.notes.append,
            )
        else:
            served = WorkerSupply(world, driver, stop_requested, end.close, inbox=end)
        self.supply = MixedSupply(sampled, served)

    def collect(self, step: int) -> list[Group]:
        return self.supply.order(step)()


def of_own_engine(both: Both) -> list[Completion]:
    futures = [both.inbox.put(asked(seed)) for seed in range(3)]
    return [future.result(120) for future in futures]


def test_each_batch_holds_groups_of_both_sides_and_each_side_settles_its_own():
    with single_rank_group() as world:
        both = Both(world, FakeEngine(), lambda: False, of_own_engine)
        steps = []
        for step in range(2):
            groups = both.collect(step)
            steps.append((groups, both.supply.settle(groups)))
        state = both.supply.state_dict()
        both.supply.close()
    (first, settled_first), (second, settled) = steps
    assert [group.prompt.source for group in first] == ["own"] * PROMPTS + ["atropos"]
    assert first[-1].rollouts == [_rollout(completion_of(asked(seed))) for seed in range(3)]
    indices = [group.prompt.index for group in first + second]
    assert len(set(indices)) == len(indices)
    assert both.prompts.recorded == [first[:PROMPTS], second[:PROMPTS]]
    assert (settled_first.trained_now, settled_first.released) == ([0, 1, 2, 4], [])
    assert (settled.trained_now, settled.released) == ([0, 1, 2, 4], [first[PROMPTS - 1]])
    assert settled.metrics == {"own": 1.0, "outside": 1.0}
    assert state == {"sampled": {"given": 2 * PROMPTS}, "served": {"read": 2, "taken": []}}


def test_a_note_says_when_requests_were_pending_for_long(monkeypatch):
    with single_rank_group() as world:
        both = Both(world, FakeEngine(), lambda: False, of_own_engine)
        both.collect(0)
        assert both.notes == []
        monkeypatch.setattr(supply, "LONG_SLEEP_SECONDS", -1.0)
        both.collect(1)
        both.supply.close()
    assert [note.partition(" for ")[0] for note in both.notes] == ["atropos: requests were pending"]


def test_a_restored_supply_continues_both_sides():
    with single_rank_group() as world:
        both = Both(world, FakeEngine(), lambda: False, of_own_engine)
        both.supply.load_state_dict({"sampled": {"given": 8}, "served": {"read": 5}})
        groups = both.collect(2)
        with pytest.raises(EnvironmentSetupError, match="had no atropos entry beside others"):
            both.supply.load_state_dict({"given": 8})
        both.supply.close()
    assert [group.prompt.text for group in groups[:PROMPTS]] == ["p8", "p9", "p10", "p11"]
    assert groups[-1].prompt.index == 2 * 5 + 1


def test_requests_from_outside_are_answered_while_prompts_are_sampled():
    guest = asked(7)
    answered: list[bool] = []

    def on_step() -> None:
        answered.append(future.done() and (0, 0) in engine.running)

    with single_rank_group() as world:
        engine = FakeEngine(decode_steps=lambda request: 2 if request.key == guest.key else 20, on_step=on_step)
        both = Both(world, engine, lambda: False, of_own_engine)
        future = both.inbox.put(guest)
        both.collect(0)
        both.supply.close()
    assert any(answered)


def test_a_stop_while_prompts_are_sampled_also_ends_serving():
    with single_rank_group() as world:
        engine = FakeEngine(decode_steps=lambda request: 10**9, on_step=lambda: stop.set())
        stop, ended = threading.Event(), []
        both = Both(world, engine, stop.is_set, lambda both: ended.append(both.outside.end.wait(120)))
        order = both.supply.order(0)
        with pytest.raises(Stopped):
            order()
        with pytest.raises(Stopped):
            both.supply.order(1)
        both.supply.close()
    assert ended == [True]
    assert not engine.running


def test_a_stopped_step_leaves_the_state_before_it_and_keeps_groups_from_outside():
    """Its prompts are sampled again by the resumed run; a batch from outside comes only once."""
    stop = threading.Event()
    with single_rank_group() as world:
        engine = FakeEngine(on_step=lambda: both.outside.read and stop.set())
        both = Both(world, engine, stop.is_set, lambda both: [completion_of(asked(0))])
        both.supply.settle(both.collect(0))
        with pytest.raises(Stopped):
            both.collect(1)
        state = both.supply.state_dict()
        both.supply.close()
    assert both.prompts.given == 2 * PROMPTS
    assert state == {"sampled": {"given": PROMPTS}, "served": {"read": 1, "taken": [1]}}


def answered_by_the_idle_rank(world: World) -> tuple[bool, list[str], dict[str, Any] | None]:
    """Rank 0 cannot end its share before rank 1, which has nothing left to sample, has answered a request."""
    answers: list[bool] = []
    with ThreadPoolExecutor(1) as pool:

        def wait_for_answer() -> None:
            if not answers and both.links:
                answers.append(both.links[0].put(asked(1)).exception(120) is None)

        def on_step() -> None:
            if world.is_main and both.engine.running:
                pool.submit(wait_for_answer).result()

        engine = FakeEngine(decode_steps=lambda request: 3, on_step=on_step)
        both = Both(world, engine, lambda: False, lambda both: [both.links[0].put(asked(2)).result(120)])
        groups = both.collect(0)
    state = both.supply.state_dict()
    both.supply.load_state_dict(state)
    both.supply.close()
    return bool(answers and answers[0]), [group.prompt.text for group in groups], state["served"]


def test_a_rank_without_further_prompts_serves_requests_while_others_sample():
    (answered, groups, state), (_, same, nothing) = run_on_ranks(answered_by_the_idle_rank, 2)
    assert answered
    assert (state, nothing) == ({"read": 0, "taken": [0]}, None)
    assert groups == same == ["p0", "p1", "p2", "p3", ""]
