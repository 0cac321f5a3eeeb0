"""The engine has the policy's weights after each sync on CUDA: with sleep, in 16 bits, with tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from colocated_grpo.runtime.distributed import World, local_part
from tests.support.engines import PROBE, Pair, request_of
from tests.support.families import SETTINGS
from tests.support.ranks import run_on_ranks
from tests.support.training_runs import tiny_model

TIMEOUT = 300.0
ENGINE = {"enforce_eager": False, "max_num_seqs": 8}
CLOSE = 0.15
"""Bfloat16 on both sides, different kernels."""
CLOSE_IN_8_BITS = 0.5


def followed(world: World, folder: Path, engine: dict[str, Any]) -> dict[str, Any]:
    pair = Pair(world, folder, engine=ENGINE | engine)
    return {**three_phases(pair), "path": "views" if pair.sync.plan is not None else "load_weights"}


def shared(world: World, folder: Path) -> dict[str, Any]:
    """Return the facts of `followed`, and the addresses of the policy's weights before and after."""
    pair = Pair(world, folder, engine=ENGINE, weights="shared")
    addresses = [[parameter.data_ptr() for parameter in pair.policy.model.parameters()]]
    facts = three_phases(pair)
    addresses.append([parameter.data_ptr() for parameter in pair.policy.model.parameters()])
    return {**facts, "addresses": addresses}


def three_phases(pair: Pair) -> dict[str, Any]:
    """Run three rollout phases as the training loop does: between them the engine sleeps and the weights change."""
    facts: dict[str, Any] = {"after": [], "sampling": [], "free": []}
    for phase in range(3):
        pair.engine.wake("weights")
        pair.write()
        pair.engine.wake("kv_cache")
        facts["after"].append(pair.disagreement())
        [completion] = pair.generate([request_of(0, phase)])
        facts["sampling"].append(pair.sampling_error(PROBE, completion, 0.7))
        pair.engine.sleep()
        torch.cuda.synchronize()
        facts["free"].append(torch.cuda.mem_get_info()[0])
        pair.change_weights()
    pair.engine.close()
    return facts


def assert_follows(facts: dict[str, Any], close: float = CLOSE) -> None:
    assert max(facts["after"]) < close
    assert max(facts["sampling"]) < close
    assert facts["free"][0] - facts["free"][-1] < 64 << 20, "each sleep leaks memory"


def opposed(world: World, folder: Path, weights: str) -> dict[str, Any]:
    """Return the engine's scores for the policy, for an opponent with its initial weights, and for the policy again."""
    environments = [{"type": "turns", "name": "town", "opponent": {}}]
    pair = Pair(world, folder, engine=ENGINE, weights=weights, environments=environments)
    pair.engine.wake("weights")
    pair.write()
    pair.engine.wake("kv_cache")
    facts: dict[str, Any] = {"initial": pair.engine_logprobs()}
    pair.change_weights()
    pair.write()
    facts["before"] = pair.engine_logprobs()
    with pair.opponent.plays():
        facts["opponent"] = pair.engine_logprobs()
    facts["after"] = pair.engine_logprobs()
    facts["devices"] = {local_part(weight).device.type for weight in pair.opponent.into_engine.parameters.values()}
    pair.engine.close()
    return facts


def assert_plays(facts: dict[str, Any]) -> None:
    assert facts["opponent"] == facts["initial"] != facts["before"]
    assert facts["after"] == facts["before"]
    assert facts["devices"] == {"cpu"}


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["copied", "shared"])
def test_an_opponent_is_loaded_from_host_memory_and_the_policys_weights_are_restored(weights):
    [facts] = run_on_ranks(opposed, 1, tiny_model(), weights, timeout=TIMEOUT)
    assert_plays(facts)


@pytest.mark.multigpu(2)
def test_an_opponent_sharded_over_two_devices_plays_on_both():
    for facts in run_on_ranks(opposed, 2, tiny_model(), "copied", timeout=TIMEOUT):
        assert_plays(facts)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma3", "qwen3_moe"])
def test_the_engine_follows_the_policy_through_sleep(architecture):
    [facts] = run_on_ranks(followed, 1, tiny_model(architecture, edits=SETTINGS[architecture]), {}, timeout=TIMEOUT)
    assert facts["path"] == "views"
    assert_follows(facts)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("quantization", [None, "fp8", "fp8_per_channel"])
def test_an_engine_with_8_bits_follows_the_policy_through_sleep(quantization, cache):
    engine = {"args": {"quantization": quantization, "kv_cache_dtype": cache}}
    [facts] = run_on_ranks(followed, 1, tiny_model(head_dim=64), engine, timeout=TIMEOUT)
    assert facts["path"] == ("load_weights" if quantization == "fp8" else "views")
    assert_follows(facts, CLOSE_IN_8_BITS)


@pytest.mark.multigpu(2)
def test_the_engines_of_two_devices_with_fp8_weights_follow_the_policy_through_sleep():
    engine = {"args": {"quantization": "fp8_per_channel"}}
    for facts in run_on_ranks(followed, 2, tiny_model(head_dim=64), engine, timeout=TIMEOUT):
        assert facts["path"] == "views"
        assert_follows(facts, CLOSE_IN_8_BITS)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma3"])
def test_an_engine_with_shared_weights_follows_the_policy_through_sleep(architecture):
    [facts] = run_on_ranks(shared, 1, tiny_model(architecture), timeout=TIMEOUT)
    before, after = facts["addresses"]
    assert before == after
    assert_follows(facts)


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_engines_of_two_devices_follow_the_policy_through_sleep(tensor_parallel):
    for facts in run_on_ranks(followed, 2, tiny_model(), {"tensor_parallel_size": tensor_parallel}, timeout=TIMEOUT):
        assert facts["path"] == "views"
        assert_follows(facts)


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_an_engine_of_two_devices_follows_a_policy_with_experts(expert_parallel):
    """It has half of each expert on each device, or half of the experts."""
    engine = {"tensor_parallel_size": 2, "args": {"enable_expert_parallel": expert_parallel}}
    folder = tiny_model("qwen3_moe", edits=SETTINGS["qwen3_moe"])
    for facts in run_on_ranks(followed, 2, folder, engine, timeout=TIMEOUT):
        assert_follows(facts)
