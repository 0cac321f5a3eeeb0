"""From prompts to scored groups: every prompt once, every score with its completion, no rank hanging on another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from colocated_grpo.environments.base import Scorer
from colocated_grpo.environments.rewards.functions import RewardScorer, build_rewards
from colocated_grpo.environments.rewards.scoring import resolve_awaitable
from colocated_grpo.environments.user_code import loading
from colocated_grpo.rollout import collect, reward_calls
from colocated_grpo.rollout.collect import Collector, Stopped
from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.rollout.episodes import EpisodeRunner
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.prompt_queue import Dispatch, Job, dynamic_dispatch, static_dispatch
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.sources import RewardConfig
from colocated_grpo.types import Completion, Group, Prompt, Score
from tests.support.fakes import Clock, FakeEngine, SumScorer, completion_of, text_of
from tests.support.ranks import run_on_ranks, single_rank_world

SAMPLING = Sampling(temperature=0.7, max_tokens=6)


def job_of(prompts: int, group_size: int = 3, name: str = "train/0") -> Job:
    made = [
        Prompt(index=100 + i, token_ids=[i % 7, 1, 2], text=f"p{i}", item={"prompt": f"p{i}"}, source="fake")
        for i in range(prompts)
    ]
    return Job(name=name, prompts=made, group_size=group_size, sampling=SAMPLING)


class Judge:
    """Runs a function for its effect, then scores with 1."""

    def __init__(self, before: Callable[[Prompt], object]) -> None:
        self._before = before

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        self._before(prompt)
        return [Score(reward=1.0) for _ in completions]


def collector_of(
    engine: FakeEngine,
    scorer: Scorer,
    world: World,
    dispatch: Dispatch | None = None,
    *,
    workers: int = 4,
    timeout: float = 30.0,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Collector:
    inbox = Inbox()
    return Collector(
        Driver(engine, inbox),
        EpisodeRunner({}, None, inbox, seed=0, tool_timeout=1.0),
        {"fake": scorer},
        text_of,
        world,
        dispatch or dynamic_dispatch(world.store, world.size),
        seed=0,
        reward_workers=workers,
        reward_timeout=timeout,
        stop_requested=stop_requested,
    )


def rewards_of(groups: Sequence[Group]) -> list[list[float | None]]:
    return [[rollout.score.reward for rollout in group.rollouts] for group in groups]


@given(st.data())
def test_every_score_belongs_to_its_completion_in_whatever_order_they_finish(data):
    prompts, group_size = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 4))
    job = job_of(prompts, group_size)
    count = prompts * group_size
    steps = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    slots = data.draw(st.integers(1, count))
    engine = FakeEngine(
        max_num_seqs=slots, decode_steps=lambda request: steps[request.key[0] * group_size + request.key[1]]
    )
    collector = collector_of(engine, SumScorer(), single_rank_world())
    groups = collector.collect(job)
    collector.close()
    assert [group.prompt for group in groups] == list(job.prompts)
    answers = {request.key: completion_of(request).token_ids for request in engine.submitted}
    for index, group in enumerate(groups):
        assert len(group.rollouts) == group_size
        for sibling, rollout in enumerate(group.rollouts):
            sampled = rollout.token_ids[rollout.prompt_length :]
            assert sampled == answers[index, sibling]
            assert rollout.score.reward == sum(sampled)
            assert rollout.text == text_of(sampled)
            assert rollout.token_ids[: rollout.prompt_length] == group.prompt.token_ids
            assert rollout.loss_mask == [False] * 3 + [True] * len(sampled)
            assert [value < 0 for value in rollout.sampling_logprobs] == rollout.loss_mask


def test_the_order_in_which_completions_finish_changes_nothing():
    slow_first = FakeEngine(decode_steps=lambda request: 20 - request.key[0])
    slow_last = FakeEngine(decode_steps=lambda request: 1 + request.key[0] + 3 * request.key[1])
    first, last = (
        collector_of(engine, SumScorer(), single_rank_world()).collect(job_of(8)) for engine in (slow_first, slow_last)
    )
    assert first == last


def test_seeds_depend_on_the_job_the_prompt_and_the_sibling_and_are_all_different():
    engine = FakeEngine()
    collector = collector_of(engine, SumScorer(), single_rank_world())
    collector.collect(job_of(4, name="train/0"))
    collector.collect(job_of(4, name="train/1"))
    assert len({request.seed for request in engine.submitted}) == len(engine.submitted) == 24


def test_single_completions_are_admitted_together_and_keep_all_slots_busy():
    steps, entered = [1 + 7 * index % 40 for index in range(256)], []
    engine = FakeEngine(
        max_num_seqs=32,
        decode_steps=lambda request: steps[request.key[0]],
        on_step=lambda: entered.append(len(engine.submitted)),
    )
    collector_of(engine, SumScorer(), single_rank_world()).collect(job_of(256, group_size=1))
    entries = len(set(entered))
    assert entries < 256 / 8
    # An entry takes three steps from all. Made whenever a seat falls free: 3.6 times the steps of full seats.
    assert len(entered) + 3 * entries < 1.75 * sum(steps) / 32


def test_no_more_completions_run_than_the_engine_has_room_for():
    engine = FakeEngine(max_num_seqs=4, decode_steps=lambda request: 5)
    collector_of(engine, SumScorer(), single_rank_world()).collect(job_of(10, group_size=3))
    assert engine.most_running == 4


def test_an_exhausted_counter_is_not_incremented_again():
    asked = []

    class CountingStore(dist.HashStore):
        def add(self, key: str, amount: int) -> int:
            asked.append(key)
            return super().add(key, amount)

    engine = FakeEngine(decode_steps=lambda request: 50 if request.key == (3, 0) else 1)
    dispatch = dynamic_dispatch(CountingStore(), num_engines=2)
    collector_of(engine, SumScorer(), single_rank_world(), dispatch).collect(job_of(4))
    assert len(asked) == 5


def test_rewards_run_while_other_completions_decode():
    scored = threading.Event()
    engine = FakeEngine(
        # Prompt 1 decodes on until prompt 0 has its reward: without overlap this never ends.
        decode_steps=lambda request: 1 if request.key[0] == 0 else 3,
        on_step=lambda: None if len(engine.running) > 3 else scored.wait(120) or pytest.fail("no overlap"),
    )
    judge = Judge(lambda prompt: scored.set() if prompt.text == "p0" else None)
    assert rewards_of(collector_of(engine, judge, single_rank_world()).collect(job_of(2))) == [[1.0] * 3] * 2


def even_only(completions: Sequence[str], **columns: object) -> list[float]:
    if any(len(text.split()) % 2 for text in completions):
        raise ValueError("odd length")
    return [2.0] * len(completions)


def one_too_many(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    return [1.0] * (len(completions) + (prompts[0] == "p1"))


def user_reward(name: str) -> RewardScorer:
    return RewardScorer(build_rewards([RewardConfig(name=f"{__file__}:{name}")], "rewards"), max_steps=1)


def test_a_reward_that_raises_costs_that_completion_only():
    groups = collector_of(FakeEngine(), user_reward("even_only"), single_rank_world()).collect(job_of(8))
    rollouts = [(rollout, group.rollouts) for group in groups for rollout in group.rollouts]
    for rollout, siblings in rollouts:
        odd = len(rollout.text.split()) % 2
        all_odd = all(len(sibling.text.split()) % 2 for sibling in siblings)
        assert rollout.score.reward == ((None if all_odd else 0.0) if odd else 2.0)
        line = even_only.__code__.co_firstlineno + 2
        error = f"even_only: ValueError: odd length (test_collect.py, line {line})"
        assert rollout.score.error == (error if odd else None)
    assert {rollout.score.reward for rollout, _ in rollouts} >= {0.0, 2.0}


def test_a_wrong_number_of_rewards_costs_that_prompt_only():
    groups = collector_of(FakeEngine(), user_reward("one_too_many"), single_rank_world()).collect(job_of(3))
    assert rewards_of(groups) == [[1.0] * 3, [None] * 3, [1.0] * 3]
    assert groups[1].rollouts[0].score.error == "one_too_many: WrongNumberOfRewards: 4 rewards for 3 completions"


@pytest.fixture
def never():
    """An event that a hanging reward waits for; set at the end, so that its thread does not outlive the test."""
    event = threading.Event()
    yield event
    event.set()


def test_a_reward_that_hangs_costs_that_prompt_only_and_no_worker_of_the_next_batch(never):
    judge = Judge(lambda prompt: never.wait() if prompt.text in ("p1", "p2") else None)
    collector = collector_of(FakeEngine(), judge, single_rank_world(), workers=3, timeout=1.0)
    groups = collector.collect(job_of(4))
    assert rewards_of(groups) == [[1.0] * 3, [None] * 3, [None] * 3, [1.0] * 3]
    error = groups[1].rollouts[0].score.error
    assert error.startswith("no reward within rollout.reward_timeout=1 s, in <lambda> (test_collect.py, line ")
    # Four hanging rewards by now: with the three workers of the first batch nothing would be scored any more.
    collector.collect(job_of(4, name="train/1"))
    assert rewards_of(collector.collect(job_of(4, name="train/2")))[3] == [1.0] * 3


def test_rewards_that_hang_cost_nothing_to_those_queued_behind_them(never):
    judge = Judge(lambda prompt: never.wait() if prompt.text in ("p0", "p1", "p9") else None)
    collector = collector_of(FakeEngine(), judge, single_rank_world(), workers=2, timeout=1.0)
    groups = collector.collect(job_of(32))
    assert [group.prompt.text for group in groups if group.rollouts[0].score.error] == ["p0", "p1", "p9"]


def test_a_reward_that_always_hangs_costs_one_timeout_and_not_one_for_every_prompt(never):
    began = []
    judge = Judge(lambda prompt: (began.append(prompt.text), never.wait()))
    groups = collector_of(FakeEngine(), judge, single_rank_world(), workers=2, timeout=1.0).collect(job_of(16))
    assert rewards_of(groups) == [[None] * 3] * 16
    assert len(began) == 4


def test_queueing_time_does_not_count_toward_the_reward_timeout(monkeypatch):
    clock = Clock()
    for module in (reward_calls, collect):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(reward_calls, "POLL_SECONDS", 0.01)
    judge = Judge(lambda prompt: clock.move(0.2))  # together they take longer than one may
    collector = collector_of(FakeEngine(), judge, single_rank_world(), workers=1, timeout=0.3)
    assert rewards_of(collector.collect(job_of(5))) == [[1.0] * 3] * 5


class AsyncJudge:
    """A user's async reward of which some calls block its event loop."""

    def __init__(self, blocks: Callable[[Prompt], object]) -> None:
        self._blocks = blocks

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        async def value() -> float:
            self._blocks(prompt)
            return 1.0

        return [Score(reward=resolve_awaitable(value())) for _ in completions]


def test_an_async_reward_that_blocks_its_loop_costs_the_next_batch_nothing(never, monkeypatch):
    monkeypatch.setattr(loading, "GRACE", 0.05)
    judge = AsyncJudge(lambda prompt: never.wait() if prompt.index == 100 else None)
    collector = collector_of(FakeEngine(), judge, single_rank_world(), workers=2, timeout=1.0)
    collector.collect(job_of(1))
    job = job_of(5, name="train/1")
    assert rewards_of(collector.collect(replace(job, prompts=job.prompts[1:]))) == [[1.0] * 3] * 4


def test_an_event_loop_is_kept_as_long_as_it_responds():
    loop = loading.ReusableLoop()
    first = loop.get()
    loop.retire_if_blocked()
    assert loop.get() is first
    loading.retire_loop(first)


def test_a_stop_ends_the_batch_and_leaves_nothing_running():
    steps = []
    engine = FakeEngine(decode_steps=lambda request: 1000, on_step=lambda: steps.append(1))
    collector = collector_of(engine, SumScorer(), single_rank_world(), stop_requested=lambda: len(steps) == 3)
    with pytest.raises(Stopped):
        collector.collect(job_of(4))
    assert len(steps) == 3
    assert engine.events == ["abort"]
    assert not engine.running


def test_a_stop_does_not_wait_for_a_reward_that_hangs(never, monkeypatch):
    monkeypatch.setattr(reward_calls, "STOP_SECONDS", 0.1)
    judge, stopping = Judge(lambda prompt: never.wait()), threading.Event()
    collector = collector_of(FakeEngine(), judge, single_rank_world(), timeout=3600, stop_requested=stopping.is_set)
    gather = collector.sample(job_of(1))
    stopping.set()
    with pytest.raises(Stopped):
        gather()


def test_static_dispatch_gives_prompt_i_to_engine_i_modulo_the_engines():
    queues = [static_dispatch(engine, 3)(job_of(8)) for engine in range(3)]
    assert [list(iter(queue.take, None)) for queue in queues] == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_dynamic_dispatch_gives_each_prompt_once_and_no_engine_starts_with_more_than_an_even_part():
    store = dist.HashStore()
    first, second = dynamic_dispatch(store, 2)(job_of(5)), dynamic_dispatch(store, 2)(job_of(5))
    taken = [queue.take() for queue in (first, second, second, second, first, first, second)]
    assert taken == [0, 1, 2, 3, 4, None, None]
    assert first.max_running == 3 * 3


def test_replicated_engines_all_complete_every_prompt_and_one_result_is_used():
    queues = [static_dispatch(0, 1, counts=rank == 0)(job_of(3)) for rank in range(2)]
    assert [list(iter(queue.take, None)) for queue in queues] == [[0, 1, 2]] * 2
    assert [queue.counts for queue in queues] == [True, False]


# Two ranks


def uneven_work(world: World) -> tuple[list[list[Group]], int]:
    """Three batches in which rank 0 decodes until rank 1 has taken all it left; the groups and this rank's part."""
    batches, part = [], 0
    for batch in range(3):
        job = job_of(20, group_size=2, name=f"train/{batch}")

        def decode(job: Job = job) -> None:
            while world.rank == 0 and world.store.add(f"tickets/{job.name}", 0) < 20:
                pass

        engine = FakeEngine(max_num_seqs=4, decode_steps=lambda request: 1, on_step=decode)
        batches.append(collector_of(engine, SumScorer(), world).collect(job))
        part += len(engine.submitted)
    return batches, part


def test_a_slow_rank_takes_fewer_prompts_and_blocks_no_other_rank():
    (slow_batches, slow_part), (fast_batches, fast_part) = run_on_ranks(uneven_work, 2)
    assert slow_batches == fast_batches
    assert slow_part + fast_part == 3 * 20 * 2
    assert slow_part < fast_part
    for batch in slow_batches:
        assert [group.prompt.text for group in batch] == [f"p{i}" for i in range(20)]


def with_each_sharing(world: World) -> list[tuple[list[Group], int]]:
    outcomes = []
    ways = {
        "counter": dynamic_dispatch(world.store, world.size),
        "fixed": static_dispatch(world.rank, world.size),
        "replicated": static_dispatch(0, 1, counts=world.is_main),
    }
    for way in ways.values():
        engine = FakeEngine()
        # One job name for all of them, so that the seeds are the same: only the first way counts in the store.
        groups = collector_of(engine, SumScorer(), world, way).collect(job_of(7))
        outcomes.append((groups, len(engine.submitted)))
    return outcomes


def test_completions_and_scores_do_not_depend_on_the_rank_that_serves_a_prompt():
    ranks = run_on_ranks(with_each_sharing, 2)
    everything = [groups for rank in ranks for groups, _ in rank]
    assert all(groups == everything[0] for groups in everything)
    (counter, fixed, replicated) = ([part for _, part in way] for way in zip(*ranks, strict=True))
    assert sum(counter) == 7 * 3
    assert fixed == [4 * 3, 3 * 3]
    assert replicated == [7 * 3, 7 * 3]


def stop_on_rank_1(world: World) -> str:
    engine = FakeEngine(decode_steps=lambda request: 10)
    # A fixed half of the prompts: with the counter rank 0 may take them all, and rank 1 has nothing to stop.
    half = static_dispatch(world.rank, world.size)
    collector = collector_of(engine, SumScorer(), world, half, stop_requested=lambda: world.rank == 1)
    try:
        collector.collect(job_of(4))
    except Stopped:
        return "stopped"
    return "finished"


def test_a_stop_request_to_one_rank_stops_all():
    assert run_on_ranks(stop_on_rank_1, 2) == ["stopped", "stopped"]


def test_a_prompts_pattern_travels_with_each_of_its_requests():
    job = job_of(3, 2)
    prompts = [replace(job.prompts[0], pattern="a|b"), *job.prompts[1:]]
    engine = FakeEngine()
    world = single_rank_world()
    collector_of(engine, SumScorer(), world).collect(replace(job, prompts=prompts))
    assert {(request.key[0], request.pattern) for request in engine.submitted} == {(0, "a|b"), (1, None), (2, None)}
