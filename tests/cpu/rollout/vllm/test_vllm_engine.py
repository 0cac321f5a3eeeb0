"""The real engine beside the trainer: what it promises, and what it leaves alone."""

from __future__ import annotations

import gc
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.patches import report
from colocated_grpo.errors import RunError
from colocated_grpo.rollout.engine import TokenDelta
from colocated_grpo.rollout.vllm import patches
from colocated_grpo.rollout.vllm.spec import EngineSpec
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.generation import RepetitionDetectionConfig
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.types import Completion
from tests.support.engines import PROBE, Pair, request_of
from tests.support.ranks import run_on_ranks
from tests.support.training_runs import tiny_model

TIMEOUT = 300.0
TEMPERATURE = 0.7
LONG_PROMPT = [3 + (7 * i) % 60 for i in range(40)]


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def process_state(build: Any) -> dict[str, Any]:
    """The trainer's process after `build`, and the draws it would have seen without it."""

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    seed()
    expected = draws()
    torch.set_float32_matmul_precision("highest")
    frozen = gc.get_freeze_count()
    seed()
    build()
    return {
        "draws": draws(),
        "expected": expected,
        "precision": torch.get_float32_matmul_precision(),
        "frozen": gc.get_freeze_count() - frozen,
    }


def engine_facts(world: World, folder: Path, stop: list[str], cache: Path) -> dict[str, Any]:
    """Everything that one engine can show, from one start of it. cache: vLLM's, empty as in a first start."""
    os.environ["VLLM_CACHE_ROOT"] = str(cache)
    pair: Pair

    def build() -> None:
        nonlocal pair
        pair = Pair(
            world,
            folder,
            rollout={"max_prompt_tokens": 64, "stop": stop, "temperature": TEMPERATURE},
            # A batch of tokens that many prompts overflow.
            engine={"args": {"block_size": 32, "max_num_batched_tokens": 128}},
        )

    facts = {"process": process_state(build)}
    pair.write()
    facts |= (
        seeds(pair)
        | streamed(pair, tuple(stop))
        | errors(pair)
        | {"refused": refused(pair)}
        | ends(pair, tuple(stop))
        | aborted(pair)
        | stale_prefix(pair)
    )
    pair.engine.close()
    total = torch.ones(3)
    dist.all_reduce(total)
    facts["after close"] = (dist.is_initialized(), total.tolist(), world.gather_objects("here"))
    return facts | {"patches": report(patches.PATCHES)}


def seeds(pair: Pair) -> dict[str, Any]:
    alone = [pair.generate([request_of(0, seed)])[0] for seed in (1, 2)]
    neighbours = [request_of(number, 100 + number, prompt=PROBE[number:]) for number in range(5)]
    [*_, again] = pair.generate([*neighbours, request_of(5, 1)])
    prompts = [LONG_PROMPT[-number:] + LONG_PROMPT[:-number] for number in range(12)]
    [crowded, *_] = reversed(pair.generate([request_of(n, 50 + n, prompt=p) for n, p in enumerate(prompts)]))
    [uncrowded] = pair.generate([request_of(0, 61, prompt=prompts[-1])])
    return {
        "seed 1": alone[0],
        "seed 2": alone[1],
        "seed 1 among others": again,
        "among prompts that overflow a batch": crowded,
        "by itself": uncrowded,
    }


def streamed(pair: Pair, stop: tuple[str, ...]) -> dict[str, Any]:
    """Requests that stream beside some that do not: deltas by request, and completions with and without streams."""
    requests = [request_of(n, 70 + n, max_tokens=12, temperature=2.0, stop=stop if n > 2 else ()) for n in range(6)]
    alone = pair.generate(requests)
    pair.engine.submit(replace(request, stream=request.key[0] % 2 == 0) for request in requests)
    deltas: dict[int, list[TokenDelta]] = {n: [] for n in range(6)}
    done: dict[int, Completion] = {}
    while len(done) < len(requests):
        done |= {number: completion for (number, _), completion in pair.engine.step()}
        for (number, _), delta in pair.engine.deltas():
            deltas[number].append(delta)
    return {"deltas": deltas, "streamed": [done[n] for n in range(6)], "not streamed": alone}


def errors(pair: Pair) -> dict[str, float]:
    """Sampling log-probabilities against the policy's own scores."""
    greedy, sampled = pair.generate([request_of(0, 1, temperature=0.0), request_of(1, 9, temperature=TEMPERATURE)])
    return {
        "error": pair.sampling_error(PROBE, sampled, TEMPERATURE),
        "error at another temperature": pair.sampling_error(PROBE, sampled, 1.0),
        "greedy logprobs": greedy.sampling_logprobs,
    }


def refused(pair: Pair) -> list[str]:
    """Errors of the engine for requests that it does not serve, one after the other."""
    longest = pair.config.max_sequence_tokens
    wishes = [
        lambda: pair.engine.submit([request_of(0, 1, temperature=3.0)]),
        lambda: pair.engine.submit([request_of(0, 1, prompt=[5] * (longest + 1))]),
        lambda: pair.engine.top_logprobs([5] * (longest + 1), 1),
        lambda: pair.engine.top_logprobs([5] * 3, 10**6),
    ]
    said = []
    for wish in wishes:
        try:
            wish()
        except ValueError as error:
            said.append(str(error))
    return said


def ends(pair: Pair, stop: tuple[str, ...]) -> dict[str, Any]:
    free = pair.generate([request_of(0, 3, max_tokens=20)])[0]
    ended_by = free.token_ids[4]
    token = pair.generate([request_of(0, 3, max_tokens=20, stop_token_ids=(ended_by,))])[0]
    eos = pair.engine._llm.llm_engine.model_config.hf_config.eos_token_id
    detection = RepetitionDetectionConfig(max_pattern_size=8, min_count=4)
    greedy = {"max_tokens": 56, "temperature": 0.0}  # a random model soon repeats itself
    repeating = pair.generate([request_of(0, 3, **greedy), request_of(1, 3, **greedy, repetition_detection=detection)])
    endless = pair.generate([request_of(n, 300 + n, max_tokens=40, temperature=2.0) for n in range(24)])
    # Nearly uniform over some hundred characters: of many completions a few meet the digit.
    strings = pair.generate([request_of(n, n, max_tokens=24, temperature=2.0, stop=stop) for n in range(48)])
    return {
        "repeating": repeating,
        "free": free,
        "by token": token,
        "token": ended_by,
        "by string": strings,
        "eos": eos,
        "endless": endless,
    }


def aborted(pair: Pair) -> dict[str, Any]:
    stops: dict[int, tuple[str, ...]] = {5: ("a string that never comes",)}  # on the other path through vLLM
    pair.engine.submit(request_of(number, number, stop=stops.get(number, ())) for number in range(6))
    pair.engine.step()
    pair.engine.abort()
    running = pair.engine._engine.engine_core.engine_core.scheduler.get_num_unfinished_requests()
    return {
        "running after abort": running,
        "seed 1 after abort": pair.generate([request_of(0, 1)])[0],
        "seed 1 beside aborted ones": beside_aborted(pair),
    }


def beside_aborted(pair: Pair) -> Completion:
    """A completion whose neighbours are given up while they decode."""
    pair.engine.submit(request_of(number, number + 1, max_tokens=8) for number in range(4))
    for _ in range(4):
        assert not pair.engine.step()
    pair.engine.abort([(1, 0), (3, 0), "never submitted"])
    done: dict[Any, Completion] = {}
    while len(done) < 2:
        done.update(pair.engine.step())
    assert done.keys() == {(0, 0), (2, 0)}
    return done[0, 0]


def stale_prefix(pair: Pair) -> dict[str, float]:
    """The same prompt before and after a change of weights, with its prefix forgotten and not forgotten."""
    pair.generate([request_of(0, 1, prompt=LONG_PROMPT)])
    pair.change_weights()
    pair.sync.sync()
    [stale] = pair.generate([request_of(0, 1, prompt=LONG_PROMPT)])
    stale_error = pair.sampling_error(LONG_PROMPT, stale, TEMPERATURE)
    pair.engine.weights_changed(3)
    [fresh] = pair.generate([request_of(0, 1, prompt=LONG_PROMPT)])
    return {
        "stale prefix error": stale_error,
        "fresh prefix error": pair.sampling_error(LONG_PROMPT, fresh, TEMPERATURE),
        "version": fresh.policy_version,
    }


@pytest.fixture(scope="module", params=[[], ["7"]], ids=["token ids only", "stop strings"])
def facts(request, tmp_path_factory) -> dict[str, Any]:
    """Completions of each way through vLLM."""
    cache = tmp_path_factory.mktemp("cache")
    [facts] = run_on_ranks(engine_facts, 1, tiny_model(), request.param, cache, timeout=TIMEOUT)
    return {**facts, "stop": request.param}


def test_building_an_engine_leaves_the_trainers_random_state_precision_and_collector_alone(facts):
    process = facts["process"]
    assert process["draws"] == process["expected"]
    assert process["precision"] == "highest"
    assert process["frozen"] <= 0, "objects that were frozen before may be freed meanwhile"


def test_a_seed_repeats_its_completion_whatever_runs_beside_it(facts):
    assert facts["seed 1"].token_ids == facts["seed 1 among others"].token_ids
    assert facts["seed 1"].token_ids != facts["seed 2"].token_ids


def test_sampling_logprobs_are_the_policys_scores_at_the_same_temperature(facts):
    assert facts["error"] < 1e-4
    assert facts["error at another temperature"] > 0.05


def test_a_request_that_vllm_refuses_is_a_value_error_and_the_engine_goes_on(facts):
    assert len(facts["refused"]) == 4
    assert "3.0" in facts["refused"][0]


def test_streamed_tokens_add_up_to_the_completion_of_a_request_that_does_not_stream(facts):
    assert [one.token_ids for one in facts["streamed"]] == [one.token_ids for one in facts["not streamed"]]
    for number, whole in enumerate(facts["streamed"]):
        tokens = [token for delta in facts["deltas"][number] for token in delta.token_ids]
        logprobs = [value for delta in facts["deltas"][number] for value in delta.sampling_logprobs]
        count = len(whole.token_ids) - 1 if number % 2 == 0 else 0
        assert (tokens, logprobs) == (whole.token_ids[:count], whole.sampling_logprobs[:count])
        assert all(len(delta.token_ids) == 1 for delta in facts["deltas"][number])


def test_a_stop_token_ends_a_completion_and_is_part_of_it(facts):
    free, ended = facts["free"], facts["by token"]
    first = free.token_ids.index(facts["token"])
    assert ended.token_ids == free.token_ids[: first + 1]
    assert ended.finish_reason == "stop"
    assert (len(free.token_ids), free.finish_reason) == (20, "length")


def test_a_completion_that_repeats_itself_ends(facts):
    free, ended = facts["repeating"]
    length = len(ended.token_ids)
    assert (len(free.token_ids), free.finish_reason) == (56, "length")
    assert ended.finish_reason == "repetition" and ended.token_ids == free.token_ids[:length]
    assert any(ended.token_ids[-size * 4 :] == ended.token_ids[-size:] * 4 for size in range(1, 9))


def test_only_the_named_stop_tokens_end_a_completion(facts):
    endless = facts["endless"]
    assert {(len(completion.token_ids), completion.finish_reason) for completion in endless} == {(40, "length")}
    assert any(facts["eos"] in completion.token_ids for completion in endless)


def test_a_stop_string_ends_a_completion_and_is_part_of_it(facts):
    tokenizer = build_char_tokenizer()
    met = 0
    for one in facts["by string"]:
        assert len(one.token_ids) == len(one.sampling_logprobs)
        text = [tokenizer.decode(token) for token in one.token_ids]
        met += "7" in text
        if facts["stop"] and "7" in text:
            assert text.index("7") == len(text) - 1
            assert one.finish_reason == "stop" or len(text) == 24
    assert 3 < met < len(facts["by string"])


def test_prompts_that_overflow_a_batch_of_tokens_change_no_completion(facts):
    assert facts["among prompts that overflow a batch"].token_ids == facts["by itself"].token_ids


def test_an_abort_leaves_nothing_running_and_changes_no_later_completion(facts):
    assert facts["running after abort"] == 0
    later: Completion = facts["seed 1 after abort"]
    assert facts["seed 1 beside aborted ones"].token_ids == later.token_ids
    assert later.token_ids == facts["seed 1"].token_ids


def test_a_prefix_cached_with_old_weights_gives_wrong_logprobs_so_a_sync_drops_it(facts):
    assert facts["stale prefix error"] > 1e-2
    assert facts["fresh prefix error"] < 1e-4
    assert facts["version"] == 3


def refusal_of(world: World, folder: Path) -> str:
    """The error line of an engine that this machine cannot run."""
    from colocated_grpo.rollout.vllm import vllm_engine

    def refuse(**arguments: object) -> None:
        raise NotImplementedError("FP8 KV cache on CPU\nrequires AVX-512")

    vllm_engine.LLM = refuse
    spec = EngineSpec(folder=folder, dtype=torch.float32, max_model_len=64, max_num_seqs=4)
    with pytest.raises(RunError) as raised:
        vllm_engine.VLLMEngine(spec, world)
    return str(raised.value)


def test_an_engine_that_vllm_has_not_for_this_machine_is_one_line():
    [line] = run_on_ranks(refusal_of, 1, tiny_model("qwen3"), timeout=TIMEOUT)
    reason = "NotImplementedError: FP8 KV cache on CPU requires AVX-512"
    assert line == f"engine: vLLM does not start: {reason}; check engine.args"


def test_a_closed_engine_leaves_the_process_group_usable(facts):
    assert facts["after close"] == (True, [1.0, 1.0, 1.0], ["here"])


def test_every_patch_for_the_cpu_is_installed_and_reached(facts):
    rows = {row["target"].partition(":")[2]: row for row in facts["patches"]}
    on_cpu = {name: row["hits"] for name, row in rows.items() if row["status"] == "applied"}
    of_groups = {"_CPUSHMDistributed.make_group_name", "_CPUSHMDistributed._init_cpu_shm"}  # tensor parallelism only
    # Without them, engine and policy disagree in tests/cpu/runs/test_hybrid_run.py.
    of_linear_attention = {"_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu"}
    of_replay = {"Worker.initialize_from_config", "Scheduler._free_request"}  # see test_routes.py
    idle = {name for name, hits in on_cpu.items() if not hits}
    assert idle <= of_groups | of_linear_attention | of_replay, on_cpu
    others = rows.keys() - on_cpu.keys() - of_replay
    assert {rows[name]["status"] for name in others} == {
        "skipped: only on cuda",
        "skipped: only with numerics: exact",
    }
