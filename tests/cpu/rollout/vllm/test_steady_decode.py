"""Steady decoding against vLLM's own scheduler: the same steps for the model, the same tokens for the caller.

The model is an arithmetic stand-in that checks what a real one relies on: positions without gaps, and a cache block
behind every one of them.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.program import library_environment
from tests.support.engines import Pair, request_of
from tests.support.ranks import run_on_ranks
from tests.support.training_runs import tiny_model

BLOCK = 4
VOCABULARY = 50
STOPS = [3, 7]
LOOP, LOOPS_FROM, LOOP_COUNT = "loop", 14, 4
"""Requests whose tokens repeat from a position on, and the repetitions after which they end."""


def next_token(name: str, position: int) -> int:
    if name.startswith(LOOP) and position > LOOPS_FROM:
        return 9 + position % 3
    return random.Random(f"{name}/{position}").randrange(VOCABULARY)


class Runner:
    """Stands for the model: samples a token that depends on the request and the position alone."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.length: dict[str, int] = {}
        self.log: list[dict[str, int]] = []
        self.former: set[str] | None = None
        """Requests of the former step, if a request that was not in it must come with its tokens: vLLM's first model
        runner keeps only these, and with async scheduling gets no tokens of the others."""

    def run_many(self, step: Any, count: int) -> Any:
        """Sample `count` tokens of each request, as `DeviceSteps` does."""
        from colocated_grpo.rollout.vllm.steady_batch import Sampled

        first = self.run(step)
        pairs = zip(first.req_ids, first.sampled_token_ids, strict=True)
        values = np.array([row + [self.advance(name) for _ in range(count - 1)] for name, row in pairs])
        self.log[-1] = dict.fromkeys(self.log[-1], count)
        return Sampled(first.req_ids, values, -values.astype(np.float32))

    def advance(self, name: str) -> int:
        self.computed[name] += 1
        assert len(self.blocks[name]) * BLOCK >= self.computed[name], "a cache block behind every position"
        return next_token(name, self.computed[name])

    def run(self, step: Any) -> Any:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        for name in step.finished_req_ids | (step.preempted_req_ids or set()):
            self.blocks.pop(name, None)
        for new in step.scheduled_new_reqs:
            self.blocks[new.req_id] = list(new.block_ids[0])
            self.computed[new.req_id] = new.num_computed_tokens
            self.length.setdefault(new.req_id, len(new.prompt_token_ids))
        cached = step.scheduled_cached_reqs
        if self.former is not None:
            assert set(cached.req_ids) <= self.former | cached.all_token_ids.keys()
            self.former = set(step.num_scheduled_tokens)
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self.blocks[name] = list(blocks[0])
            else:
                assert computed == self.computed[name], "positions without gaps"
                self.blocks[name] += blocks[0] if blocks else []
            self.computed[name] = computed
        names, tokens = list(step.num_scheduled_tokens), []
        random.Random(len(self.log)).shuffle(names)  # a model may order its batch as it likes
        for name in names:
            self.computed[name] += step.num_scheduled_tokens[name]
            assert len(self.blocks[name]) * BLOCK >= self.computed[name], "a cache block behind every position"
            decoded = self.computed[name] >= self.length[name]
            tokens.append([next_token(name, self.computed[name])] if decoded else [])
            if decoded:
                self.length[name] = max(self.length[name], self.computed[name] + 1)
        held = [block for name in self.blocks for block in self.blocks[name]]
        assert len(held) == len(set(held)), "no block belongs to two requests"
        self.log.append(dict(step.num_scheduled_tokens))
        values = np.array([[row[0] if row else 0] for row in tokens])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=LogprobsLists(values, -values.astype(np.float32), values),
            prompt_logprobs_dict={},
            pooler_output=[],
        )


def make_scheduler(model: Path, *, is_async: bool, blocks: int, slots: int) -> Any:
    os.environ.update(library_environment("INFO"))
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True, max_model_len=64, dtype="float32"),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=256,
            max_model_len=64,
            async_scheduling=is_async,
            is_encoder_decoder=False,
        ),
    )
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return (AsyncScheduler if is_async else Scheduler)(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


class Device:
    """Stands for a GPU that takes up to `most` decode steps at once."""

    def __init__(self, most: int) -> None:
        self.tokens, self.most = 1, most

    def most_tokens(self, requests: int, cached: int) -> int:
        return self.most


def serve(
    scheduler: Any,
    steady: Any,
    device: Device,
    *,
    is_async: bool,
    arrivals: dict[int, list[Any]],
    aborts: dict[int, str],
) -> Any:
    """Drive the scheduler as vLLM's engine does: with async scheduling one step is always under way."""
    from vllm.v1.request import RequestStatus

    runner, queue = Runner(), deque()
    runner.former = set() if is_async and device.most == 1 else None
    completions: dict[str, list[Any]] = {}

    def deliver(name: str, tokens: list[int], logprobs: Any, reason: str | None) -> None:
        entry = completions.setdefault(name, [[], [], None])
        entry[0] += tokens
        entry[1] += np.asarray(logprobs).tolist()
        entry[2] = reason

    for turn in range(2000):
        for request in arrivals.get(turn, []):
            scheduler.add_request(request)
        if turn in aborts:
            scheduler.finish_requests(aborts[turn], RequestStatus.FINISHED_ABORTED)
        if not scheduler.has_requests() and not queue and turn > max(arrivals):
            return completions, runner.log
        if scheduler.has_requests():
            step = scheduler.schedule()
            many = device.tokens > 1 and step.total_num_scheduled_tokens
            run = partial(runner.run_many, count=device.tokens) if many else runner.run
            queue.append((step, run(step)))
            if is_async and len(queue) < 2:
                continue
        if not queue:
            continue
        step, output = queue.popleft()
        if output is None:
            continue
        outputs = scheduler.update_from_output(step, output)
        for chunk in steady.drain() if steady is not None else []:
            deliver(*chunk)
        for one in outputs[0].outputs if outputs else []:
            reason = None if one.finish_reason is None else str(one.finish_reason)
            deliver(one.request_id, one.new_token_ids, one.new_logprobs.logprobs[:, 0], reason)
    raise AssertionError("the scheduler never finished")


def looping_requests() -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams
    from vllm.v1.request import Request

    detection = RepetitionDetectionParams(max_pattern_size=5, min_count=LOOP_COUNT)
    return [
        Request(
            request_id=f"{LOOP} {number}",
            prompt_token_ids=[11] * (1 + number),
            sampling_params=SamplingParams(max_tokens=45, logprobs=0, repetition_detection=detection),
            pooling_params=None,
        )
        for number in range(5)
    ]


def make_requests(count: int, seed: int) -> list[Any]:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    rng = random.Random(seed)
    return [
        Request(
            request_id=f"request {number}",
            prompt_token_ids=[rng.randrange(8, VOCABULARY) for _ in range(rng.randint(1, 11))],
            sampling_params=SamplingParams(
                max_tokens=rng.choice([1, 2, 5, 17, 40]),
                stop_token_ids=STOPS if number % 3 else [],
                min_tokens=6 if number % 5 == 0 else 0,
                logprobs=0,
            ),
            pooling_params=None,
        )
        for number in range(count)
    ]


LOOPING = "looping"
SCENES = {
    "all at once": {"blocks": 400, "slots": 16, "every": 0, "aborts": {}},
    "arriving one by one": {"blocks": 400, "slots": 16, "every": 3, "aborts": {}},
    "more than fit beside each other": {"blocks": 400, "slots": 4, "every": 0, "aborts": {}},
    "too little memory": {"blocks": 24, "slots": 16, "every": 0, "aborts": {}},
    "some aborted": {"blocks": 400, "slots": 16, "every": 2, "aborts": {9: "request 2", 14: "request 5"}},
}


def both_ways(world: World, model: Path, is_async: bool, most_tokens: int) -> dict[str, Any]:
    """Each scene by vLLM alone and by steady steps."""
    from colocated_grpo.rollout.vllm.steady_decode import SteadyDecode, is_supported

    facts = {}
    for name, scene in (SCENES | {LOOPING: SCENES["all at once"]}).items():
        results = []
        for wants_steady in (False, True):
            scheduler = make_scheduler(model, is_async=is_async, blocks=scene["blocks"], slots=scene["slots"])
            assert is_supported(scheduler)
            calls = CountCalls(scheduler)
            device = Device(most_tokens)
            steady = SteadyDecode(scheduler, device) if wants_steady else None
            arrivals: dict[int, list[Any]] = {}
            requests = looping_requests() if name == LOOPING else make_requests(14, seed=3)
            for index, request in enumerate(requests):
                arrivals.setdefault(index * scene["every"], []).append(request)
            completions, log = serve(
                scheduler, steady, device, is_async=is_async, arrivals=arrivals, aborts=scene["aborts"]
            )
            free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            results.append({"completions": completions, "steps": log, "by vllm": calls.count, "free": free})
        facts[name] = results
    return facts


class CountCalls:
    def __init__(self, scheduler: Any) -> None:
        self.count = 0
        original = scheduler.schedule

        def counted(*arguments: Any) -> Any:
            self.count += 1
            return original(*arguments)

        scheduler.schedule = counted


WAYS = {
    "one step at a time": (False, 1),
    "one step ahead": (True, 1),
    "three tokens at a time": (False, 3),
    "three tokens, one step ahead": (True, 3),
}


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def facts(request) -> dict[str, Any]:
    [facts] = run_on_ranks(both_ways, 1, tiny_model(), *request.param, timeout=200.0)
    return facts | {"tokens at a time": request.param[1]}


@pytest.mark.parametrize("scene", SCENES)
def test_steady_steps_give_the_same_completions_as_vllms_scheduler(facts, scene):
    alone, steady = facts[scene]
    aborted = set(SCENES[scene]["aborts"].values())
    for name in alone["completions"].keys() - aborted:
        assert steady["completions"][name] == alone["completions"][name]
    assert all(reason for name, (*_, reason) in steady["completions"].items() if name not in aborted)


def test_a_request_that_repeats_itself_ends_within_a_search_of_the_token_where_vllm_ends_it(facts):
    from colocated_grpo.rollout.vllm.steady_batch import TOKENS_PER_SEARCH

    alone, steady = facts[LOOPING]
    assert len(alone["completions"]) == 5
    for name, (tokens, _, reason) in steady["completions"].items():
        expected, _, its_reason = alone["completions"][name]
        assert reason == its_reason == "repetition"
        assert tokens[: len(expected)] == expected
        assert 0 <= len(tokens) - len(expected) < TOKENS_PER_SEARCH + facts["tokens at a time"]
    assert steady["free"] == alone["free"]
    assert steady["by vllm"] < alone["by vllm"]


@pytest.mark.parametrize("scene", SCENES)
def test_steady_steps_return_every_cache_block(facts, scene):
    alone, steady = facts[scene]
    assert steady["free"] == alone["free"]


@pytest.mark.parametrize("scene", ["all at once", "arriving one by one", "more than fit beside each other"])
def test_steady_steps_compute_no_token_after_the_steps_in_flight(facts, scene):
    alone, steady = (sum(map(Counter, way["steps"]), Counter()) for way in facts[scene])
    assert steady.keys() == alone.keys()
    assert all(abs(steady[name] - alone[name]) <= 2 * (facts["tokens at a time"] - 1) for name in alone)


@pytest.mark.parametrize("scene", ["all at once", "more than fit beside each other"])
def test_most_steps_bypass_vllms_scheduler(facts, scene):
    alone, steady = facts[scene]
    print(scene, alone["by vllm"], steady["by vllm"], len(steady["steps"]))
    assert steady["by vllm"] < 0.5 * alone["by vllm"]


def engine_both_ways(world: World, folder: Path) -> Any:
    """The real engine's completions with steady steps and after they are taken out."""
    pair = Pair(world, folder, rollout={"max_completion_tokens": 48})
    pair.write()
    requests = [
        request_of(n, n, prompt=[5 + n, 9, 11][: 1 + n % 3], max_tokens=8 + 3 * n, stop_token_ids=tuple(STOPS))
        for n in range(12)
    ]
    fast = pair.generate(requests)
    steady = pair.engine._requests._steady
    scheduler = pair.engine._engine.engine_core.engine_core.scheduler
    scheduler.schedule, scheduler.update_from_output = steady._vllm_schedule, steady._vllm_update
    plain = pair.generate(requests)
    pair.engine.close()
    return fast, plain


def test_the_real_engine_samples_the_same_completions_with_and_without_steady_steps():
    [(fast, plain)] = run_on_ranks(engine_both_ways, 1, tiny_model(), timeout=200.0)
    assert [one.token_ids for one in fast] == [one.token_ids for one in plain]
    assert [one.finish_reason for one in fast] == [one.finish_reason for one in plain]
    for a, b in zip(fast, plain, strict=True):
        assert a.sampling_logprobs == pytest.approx(b.sampling_logprobs, abs=1e-5)
    assert {one.finish_reason for one in fast} == {"stop", "length"}


def interrupted(world: World, folder: Path) -> int:
    """Interrupt the same requests after more and more steps, and return the number of unfinished completions."""
    pair = Pair(world, folder, rollout={"max_completion_tokens": 40, "prompts_per_step": 12, "group_size": 2})
    pair.write()
    requests = [
        request_of(n, n, prompt=[5 + n, 9, 11][: 1 + n % 3], max_tokens=40, stop_token_ids=tuple(STOPS))
        for n in range(12)
    ]
    whole = dict(zip((request.key for request in requests), pair.generate(requests), strict=True))
    unfinished = 0
    for steps in (1, 2, 5, 17, 30):
        pair.engine.submit(requests)
        finished = dict(chain.from_iterable(pair.engine.step() for _ in range(steps)))
        parts = dict(pair.engine.sampled())
        pair.engine.abort()
        assert not finished.keys() & parts.keys()
        for key, part in (finished | parts).items():
            length = len(part.token_ids)
            assert part.token_ids == whole[key].token_ids[:length]
            assert part.sampling_logprobs == pytest.approx(whole[key].sampling_logprobs[:length], abs=1e-4)
            assert (key in parts) == (part.finish_reason == "abort")
        assert len(parts) + len(finished) == len(requests)
        unfinished += len(parts)
    assert [one.token_ids for one in pair.generate(requests)] == [one.token_ids for one in whole.values()]
    pair.engine.close()
    return unfinished


def test_an_interrupted_completion_is_the_beginning_of_the_whole_one():
    [unfinished] = run_on_ranks(interrupted, 1, tiny_model(), timeout=200.0)
    assert unfinished > 20


def test_stop_lists_have_rows_of_their_own_and_the_table_stays_small():
    from colocated_grpo.rollout.vllm.steady_batch import MAX_STOP_LISTS, StopTable

    def request(*stops: int, eos: int | None = 1) -> SimpleNamespace:
        return SimpleNamespace(sampling_params=SimpleNamespace(eos_token_id=eos, stop_token_ids=stops))

    table = StopTable(vocabulary=300)
    for first in range(2, 290, 2):
        requests = [request(), request(first, first + 1), request(eos=None), request()]
        rows = table.rows(requests)
        assert [np.flatnonzero(table.table[row]).tolist() for row in rows] == [
            [1],
            [1, first, first + 1],
            [],
            [1],
        ]
        assert len(table.table) <= MAX_STOP_LISTS + len(requests)


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"temperature": 0.5}, True),
        ({"temperature": 0.0}, True),
        ({"top_p": 0.9}, False),
        ({"top_k": 5}, False),
        ({"min_p": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
    ],
)
def test_only_a_temperature_leaves_sampling_to_the_plain_kernels(changes, plain):
    from colocated_grpo.rollout.engine import Request, Sampling, only_temperature
    from colocated_grpo.rollout.vllm.vllm_engine import _sampling_params

    sampling = Sampling(**{"temperature": 1.0, "max_tokens": 4, **changes})
    params = _sampling_params(Request(key=0, token_ids=[1], seed=0, sampling=sampling))
    assert only_temperature(params) is plain
