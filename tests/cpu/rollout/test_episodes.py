"""Episodes of several turns: aligned tokens, own seeds, failures kept to one, ranks that do not wait for each other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from colocated_grpo.environments.base import Episode
from colocated_grpo.environments.chat import ChatCodec, ContextExhausted, Conversation
from colocated_grpo.rollout import episodes as episodes_module
from colocated_grpo.rollout.collect import Collector, Stopped
from colocated_grpo.rollout.engine import Request, Sampling
from colocated_grpo.rollout.episodes import EpisodeRunner
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.prompt_queue import Dispatch, Job, dynamic_dispatch, static_dispatch
from colocated_grpo.runtime.distributed import World
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.types import Group, Prompt, Rollout
from tests.support.fakes import FakeEngine, SumScorer, completion_of, text_of
from tests.support.ranks import run_on_ranks, single_rank_world

ROOM = 60
TOKENIZER = build_char_tokenizer()


def prompt_of(index: int, source: str = "play", **item: Any) -> Prompt:
    text = f"<|user|>p{index}<|end|><|assistant|>"
    item = {"prompt": f"p{index}", "number": index, **item}
    return Prompt(index=100 + index, token_ids=TOKENIZER.encode(text), text=text, item=item, source=source)


def job_of(prompts: int, group_size: int = 2, *, name: str = "train/0", room: int = ROOM) -> Job:
    sampling = Sampling(temperature=0.7, max_tokens=room)
    return Job(name=name, prompts=[prompt_of(i) for i in range(prompts)], group_size=group_size, sampling=sampling)


class Play:
    """An episode made of one function."""

    def __init__(self, run: Callable[[dict[str, Any], Conversation], Any]) -> None:
        self._run = run

    def prompts(self, seed, split):
        return iter(())

    async def run(self, item: dict[str, Any], model: Conversation) -> Any:
        return await self._run(item, model)


def talk(turns: int, max_tokens: int = 5) -> Play:
    """So many turns of the policy with a short answer between them; the reward is their number."""

    async def run(item: dict[str, Any], model: Conversation) -> dict[str, float]:
        for turn in range(turns):
            if turn:
                model.observe(f"go {turn}")
            await model.generate(max_tokens)
        return {"reward": float(turns), "number": item["number"]}

    return Play(run)


def collector_of(
    engine: FakeEngine,
    episodes: Mapping[str, Episode],
    world: World | None = None,
    dispatch: Dispatch | None = None,
    *,
    tokenizer: PreTrainedTokenizerFast = TOKENIZER,
    tool_timeout: float = 120.0,
    stop_requested: Callable[[], bool] = lambda: False,
    inbox: Inbox | None = None,
) -> Collector:
    inbox, world = Inbox() if inbox is None else inbox, world or single_rank_world()
    return Collector(
        Driver(engine, inbox),
        EpisodeRunner(episodes, ChatCodec(tokenizer), inbox, seed=0, tool_timeout=tool_timeout),
        {"fake": SumScorer()},
        text_of,
        world,
        dispatch or dynamic_dispatch(world.store, world.size),
        seed=0,
        reward_workers=2,
        reward_timeout=120.0,
        stop_requested=stop_requested,
    )


def play(episode: Play, job: Job | None = None, engine: FakeEngine | None = None, **settings: Any) -> list[Group]:
    collector = collector_of(engine or FakeEngine(), {"play": episode}, **settings)
    try:
        return collector.collect(job or job_of(3))
    finally:
        collector.close()


def rollouts_of(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def test_a_rollout_holds_observed_and_sampled_tokens_in_order():
    engine = FakeEngine()
    groups = play(talk(3), job_of(4), engine)
    answers = {request.key: (request, completion_of(request)) for request in engine.submitted}
    assert len(answers) == 4 * 2 * 3
    for index, group in enumerate(groups):
        for sibling, rollout in enumerate(group.rollouts):
            tokens = list(group.prompt.token_ids)
            mask, logprobs = [False] * len(tokens), [0.0] * len(tokens)
            for turn in range(3):
                request, completion = answers["train/0", index, sibling, turn]
                if turn:
                    closes = [] if tokens[-1] == TOKENIZER.eos_token_id else [TOKENIZER.eos_token_id]
                    said = closes + TOKENIZER.encode(f"<|user|>go {turn}<|end|><|assistant|>")
                    tokens, mask, logprobs = tokens + said, mask + [False] * len(said), logprobs + [0.0] * len(said)
                assert request.token_ids == tokens
                sampled = completion.token_ids
                tokens, mask = tokens + sampled, mask + [True] * len(sampled)
                logprobs = logprobs + completion.sampling_logprobs
            assert (rollout.token_ids, rollout.loss_mask, rollout.sampling_logprobs) == (tokens, mask, logprobs)
            assert rollout.prompt_length == len(group.prompt.token_ids)
            assert rollout.score.reward == 3.0
            assert rollout.score.parts == {"number": index}
            assert rollout.temperature == 0.7
            assert "<|end|><|user|>go 1<|end|><|assistant|>" in rollout.text


@pytest.mark.parametrize("observed", ["word " * 1_000_000, [{"role": "user", "content": "word " * 1_000_000}]])
def test_an_observation_of_megabytes_is_not_encoded(monkeypatch, observed):
    encoded = []
    monkeypatch.setattr(ChatCodec, "observation", lambda self, *_args: encoded.append(self) or [])

    async def run(item: dict[str, Any], model: Conversation) -> float:
        await model.generate(5)
        with pytest.raises(ContextExhausted, match="an observation of at least "):
            model.observe(observed)
        return 0.5

    [rollout] = rollouts_of(play(Play(run), job_of(1, 1)))
    assert (rollout.score.reward, rollout.finish_reason, encoded) == (0.5, "length", [])


def test_an_observation_may_be_an_iterator():
    async def run(item: dict[str, Any], model: Conversation) -> float:
        await model.generate(5)
        model.observe({"role": "user", "content": text} for text in ("left", "right"))
        await model.generate(5)
        return 1.0

    [rollout] = rollouts_of(play(Play(run), job_of(1, 1)))
    assert "<|user|>left<|end|><|user|>right<|end|>" in rollout.text


@pytest.mark.parametrize("observed", [42, None, [1, 2], {"role": "user", "content": "x"}])
def test_an_observation_of_another_type_is_named_with_what_is_allowed(observed):
    async def run(item: dict[str, Any], model: Conversation) -> float:
        await model.generate(5)
        model.observe(observed)
        return 1.0

    [rollout] = rollouts_of(play(Play(run), job_of(1, 1)))
    assert rollout.score.error.startswith(f"TypeError: observe({observed}): ")
    assert "it takes text, or a list of chat messages whose content is text (test_episodes.py, " in rollout.score.error


def test_every_turn_has_its_own_seed_whatever_rank_or_order_serves_it():
    engines = FakeEngine(), FakeEngine(decode_steps=lambda request: 1 + request.seed % 7, max_num_seqs=2)
    first, second = (play(talk(3), job_of(4), engine) for engine in engines)
    seeds = [{request.key: request.seed for request in engine.submitted} for engine in engines]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 4 * 2 * 3
    assert first == second


def test_single_completions_and_episodes_share_a_batch():
    job = job_of(6)
    mixed = [prompt_of(i, source="fake" if i % 2 else "play") for i in range(6)]
    job = Job(name=job.name, prompts=mixed, group_size=2, sampling=job.sampling)
    groups = play(talk(2), job)
    assert [group.prompt for group in groups] == mixed
    for index, group in enumerate(groups):
        for rollout in group.rollouts:
            sampled = [
                token for token, is_sampled in zip(rollout.token_ids, rollout.loss_mask, strict=True) if is_sampled
            ]
            assert rollout.score.reward == (sum(sampled) if index % 2 else 2.0)


def test_a_held_out_prompt_runs_a_group_of_one_episode():
    assert [len(group.rollouts) for group in play(talk(2), job_of(3, group_size=1))] == [1, 1, 1]


# Room


def test_an_episode_never_exceeds_its_context_and_ends_with_length():
    groups = play(talk(50, max_tokens=7), job_of(8))
    for rollout in rollouts_of(groups):
        used = len(rollout.token_ids) - rollout.prompt_length
        assert ROOM - 20 < used <= ROOM
        assert rollout.finish_reason == "length"
        assert rollout.score.reward == 0.0 and rollout.score.error is None


def test_an_episode_may_return_a_reward_when_its_context_is_full():
    async def run(item, model):
        try:
            while True:
                await model.generate(7)
                model.observe("again")
        except ContextExhausted:
            return -float(model.turns)

    for rollout in rollouts_of(play(Play(run))):
        assert rollout.score.reward < -3
        assert rollout.finish_reason == "length"


def test_a_turn_without_max_tokens_may_use_the_rest_of_the_context():
    engine = FakeEngine()

    async def run(item, model):
        await model.generate(4)
        model.observe("x")
        before = model.room
        turn = await model.generate()
        assert model.room == before - len(turn.token_ids)
        return 1.0

    groups = play(Play(run), engine=engine)
    assert all(rollout.score.error is None for rollout in rollouts_of(groups))
    end = len(prompt_of(0).token_ids) + ROOM
    for request in engine.submitted:
        assert request.sampling.max_tokens == (end - len(request.token_ids) if request.key[3] else 4)


# Failures


def test_an_exception_of_user_code_costs_only_its_episode():
    async def run(item, model):
        turn = await model.generate(5)
        if sum(turn.token_ids) % 2:
            raise KeyError("odd\nsum")
        return 1.0

    rollouts = rollouts_of(play(Play(run), job_of(8)))
    assert {rollout.score.reward for rollout in rollouts} == {None, 1.0}
    for rollout in rollouts:
        sampled = rollout.token_ids[rollout.prompt_length :]
        error = f"KeyError: 'odd\\nsum' (test_episodes.py, line {run.__code__.co_firstlineno + 3})"
        assert rollout.score.error == (error if sum(sampled) % 2 else None)
        assert rollout.loss_mask == [False] * rollout.prompt_length + [True] * len(sampled)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError("mine"), "CancelledError: mine"),
        (TimeoutError("a tool's own"), "TimeoutError: a tool's own"),
    ],
)
def test_system_exit_and_cancellation_in_user_code_are_errors_of_the_episode(error, line):
    async def run(item, model):
        raise error

    for rollout in rollouts_of(play(Play(run))):
        assert rollout.score.error == f"{line} (test_episodes.py, line {run.__code__.co_firstlineno + 1})"
        assert rollout.finish_reason == "abort"
        assert rollout.token_ids == rollout.token_ids[: rollout.prompt_length]


@pytest.mark.parametrize(
    ("result", "line"),
    [
        ("1", "ValueError: a reward must be"),
        ({"style": 1.0}, "ValueError: run() returned parts without 'reward': style"),
    ],
)
def test_a_result_that_is_no_reward_is_an_error(result, line):
    async def run(item, model):
        return result

    assert all(rollout.score.error.startswith(line) for rollout in rollouts_of(play(Play(run))))


async def observe_first(item, model):
    model.observe("hello")


async def observe_twice(item, model):
    await model.generate(3)
    model.observe("a")
    model.observe("b")


async def generate_at_once(item, model):
    await asyncio.gather(model.generate(3), model.generate(3))


async def generate_nothing(item, model):
    await model.generate(0)


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (observe_first, "RuntimeError: observe() must follow generate()"),
        (observe_twice, "RuntimeError: observe() must follow generate()"),
        (generate_at_once, "RuntimeError: generate() was called while another turn"),
        (generate_nothing, "ValueError: generate(max_tokens=0): must be at least 1"),
    ],
)
def test_a_conversation_out_of_order_is_refused(run, line):
    assert all(rollout.score.error.startswith(line) for rollout in rollouts_of(play(Play(run))))


def test_an_episode_that_ends_before_its_turn_leaves_no_running_request():
    async def run(item, model):
        turn = asyncio.ensure_future(model.generate(3))
        while engine.most_running < 2:
            await asyncio.sleep(0.001)
        assert not turn.done()
        return 1.0

    engine = FakeEngine(decode_steps=lambda request: 10**9)
    assert {rollout.score.reward for rollout in rollouts_of(play(Play(run), job_of(1), engine))} == {1.0}
    assert not engine.running


def test_siblings_do_not_see_changes_of_the_item():
    async def run(item, model):
        item["seen"] = item.get("seen", 0) + 1
        await model.generate(2)
        return float(item["seen"])

    assert {rollout.score.reward for rollout in rollouts_of(play(Play(run)))} == {1.0}


def test_a_tool_that_never_answers_costs_its_episode_only():
    async def run(item, model):
        await model.generate(3)
        if item["number"] == 1:
            await asyncio.Event().wait()
        return 1.0

    groups = play(Play(run), tool_timeout=1.0)
    rewards = [[rollout.score.reward for rollout in group.rollouts] for group in groups]
    assert rewards == [[1.0, 1.0], [None, None], [1.0, 1.0]]
    late = groups[1].rollouts[0]
    place = f"test_episodes.py, line {run.__code__.co_firstlineno + 3}"
    assert late.score.error == f"no turn and no result within rollout.tool_timeout=1 s, in run ({place})"
    assert any(late.loss_mask)


def test_sampling_time_does_not_count_toward_the_tool_timeout():
    engine = FakeEngine(decode_steps=lambda request: 12, on_step=lambda: time.sleep(0.1))
    for rollout in rollouts_of(play(talk(2), job_of(2), engine, tool_timeout=1.0)):
        assert rollout.score.reward == 2.0


@pytest.fixture
def never():
    """The event that a blocking tool waits for; set at the end, so that its thread does not outlive the test."""
    event = threading.Event()
    yield event
    event.set()


def test_an_episode_that_blocks_its_event_loop_is_abandoned_and_the_next_batch_runs(never, monkeypatch):
    monkeypatch.setattr(episodes_module, "GRACE_SECONDS", 0.1)

    async def run(item, model):
        await model.generate(3)
        if item["number"] == 1:
            never.wait()
        return 1.0

    collector = collector_of(FakeEngine(), {"play": Play(run)}, tool_timeout=1.0)
    groups = collector.collect(job_of(2))
    assert {rollout.score.reward for rollout in groups[1].rollouts} == {None}
    place = f"test_episodes.py, line {run.__code__.co_firstlineno + 3}"
    error = groups[1].rollouts[0].score.error
    assert f", in run ({place}); it blocks the event loop: run blocking code with asyncio.to_thread" in error
    one = Job(name="train/1", prompts=[prompt_of(0)], group_size=2, sampling=job_of(1).sampling)
    assert [rollout.score.reward for rollout in collector.collect(one)[0].rollouts] == [1.0, 1.0]
    collector.close()


def test_a_blocking_episode_is_abandoned_while_requests_from_outside_keep_the_engine_busy(never, monkeypatch):
    monkeypatch.setattr(episodes_module, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(episodes_module, "OVERDUE_CHECK_SECONDS", 0.01)

    async def run(item, model):
        never.wait()

    inbox = Inbox()
    engine = FakeEngine(decode_steps=lambda request: 10**9)
    collector = collector_of(engine, {"play": Play(run)}, tool_timeout=0.05, inbox=inbox)
    inbox.put(Request(key="guest", token_ids=[1], seed=0, sampling=job_of(1).sampling))
    [group] = collector.sample(job_of(1))()
    assert {rollout.score.reward for rollout in group.rollouts} == {None}
    assert engine.running.keys() == {"guest"}
    collector.close()


def loops() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "episodes"}


def test_an_abandoned_thread_ends_with_its_last_episode(never, monkeypatch):
    monkeypatch.setattr(episodes_module, "GRACE_SECONDS", 0.05)
    before = loops()

    async def run(item, model):
        await model.generate(3)
        if item["number"] == 1:
            never.wait()
        return 1.0

    collector = collector_of(FakeEngine(), {"play": Play(run)}, tool_timeout=0.1)
    collector.collect(job_of(2))
    [left_behind] = loops() - before
    never.set()
    left_behind.join(120)
    assert not left_behind.is_alive()
    collector.close()


def test_closing_ends_the_thread_and_every_episode_on_it():
    before, waiting, ended = loops(), threading.Event(), threading.Event()

    async def run(item, model):
        try:
            await model.generate(3)
            waiting.set()
            await asyncio.sleep(60)
        finally:
            ended.set()

    collector = collector_of(FakeEngine(), {"play": Play(run)}, stop_requested=waiting.is_set)
    with pytest.raises(Stopped):
        collector.collect(job_of(1, group_size=1))
    [thread] = loops() - before
    collector.close()
    thread.join(120)
    assert ended.is_set()
    assert not thread.is_alive()


def test_an_episode_that_suppresses_cancellation_is_abandoned(monkeypatch):
    monkeypatch.setattr(episodes_module, "GRACE_SECONDS", 0.1)
    left = asyncio.Event()

    async def run(item, model):
        while not left.is_set():
            try:
                await asyncio.wait_for(left.wait(), 60)
            except asyncio.CancelledError:
                continue
        return 1.0

    rollouts = rollouts_of(play(Play(run), job_of(1), tool_timeout=0.2))
    left.set()
    assert all("within rollout.tool_timeout=0.2 s" in rollout.score.error for rollout in rollouts)


def test_a_stop_ends_episodes_that_generate_and_episodes_that_wait_for_tools():
    ended, all_ended = [], threading.Event()

    async def run(item, model):
        try:
            await model.generate(3)
            await asyncio.Event().wait()
        finally:
            ended.append(item["number"])
            if len(ended) == 4:
                all_ended.set()

    engine = FakeEngine(decode_steps=lambda request: 1 if request.key[1] == 0 else 10**9)
    collector = collector_of(engine, {"play": Play(run)}, stop_requested=lambda: len(engine.running) == 2)
    with pytest.raises(Stopped):
        collector.collect(job_of(2, group_size=2))
    assert engine.events == ["abort"]
    assert not engine.running
    assert all_ended.wait(120)
    collector.close()


# Concurrency


def test_sixty_four_episodes_wait_for_a_slow_tool_in_parallel():
    turns, tool = 3, asyncio.Barrier(64)

    async def run(item, model):
        for turn in range(turns):
            await model.generate(5)
            await tool.wait()  # no call returns before all of them have begun
            if turn < turns - 1:
                model.observe("ok")
        return 1.0

    groups = play(Play(run), job_of(16, group_size=4))
    assert all(rollout.score.reward == 1.0 for rollout in rollouts_of(groups))


def test_the_driver_sleeps_while_every_episode_waits_for_its_tool():
    steps = []

    async def run(item, model):
        await model.generate(1)
        await asyncio.sleep(0.5)
        return 1.0

    engine = FakeEngine(on_step=lambda: steps.append(1))
    before = time.thread_time()
    play(Play(run), job_of(2), engine)
    assert time.thread_time() - before < 0.2
    assert len(steps) < 10


# Two ranks


def eight_turns_and_one(world: World) -> tuple[list[Group], int]:
    """Fixed shares: rank 0's episodes take 8 turns, rank 1's one."""

    async def run(item, model):
        for turn in range(1 if item["number"] % 2 else 8):
            if turn:
                model.observe("go")
            await model.generate(2)
        return float(model.turns)

    engine = FakeEngine()
    collector = collector_of(engine, {"play": Play(run)}, world, static_dispatch(world.rank, world.size))
    groups = collector.collect(job_of(6, room=400))
    collector.close()
    return groups, len(engine.submitted)


def test_ranks_whose_episodes_take_eight_turns_and_one_do_not_hang():
    (first, many), (second, few) = run_on_ranks(eight_turns_and_one, 2)
    assert first == second
    assert [group.rollouts[0].score.reward for group in first] == [8.0, 1.0] * 3
    assert (many, few) == (3 * 2 * 8, 3 * 2)


def replicated_and_counter(world: World) -> list[list[Group]]:
    outcomes = []
    for dispatch in (static_dispatch(0, 1, counts=world.is_main), dynamic_dispatch(world.store, world.size)):
        collector = collector_of(FakeEngine(), {"play": talk(3)}, world, dispatch)
        outcomes.append(collector.collect(job_of(5)))
        collector.close()
    return outcomes


def test_an_episode_does_not_depend_on_the_rank_that_runs_it():
    outcomes = [groups for rank in run_on_ranks(replicated_and_counter, 2) for groups in rank]
    assert all(groups == outcomes[0] for groups in outcomes)


def test_requests_of_abandoned_episodes_never_reach_the_engine(never, monkeypatch):
    monkeypatch.setattr(episodes_module, "GRACE_SECONDS", 0.1)
    passed = threading.Event()

    async def run(item, model):
        never.wait()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        try:
            await model.generate(3)
        finally:
            passed.set()

    engine = FakeEngine()
    collector = collector_of(engine, {"play": Play(run)}, tool_timeout=0.1)
    collector.collect(job_of(1, group_size=1))
    never.set()
    assert passed.wait(120)
    collector.driver.step()
    collector.driver.step()
    assert engine.submitted == []
    collector.close()
