"""After every sync the engine scores as the policy does: for each architecture, over ranks, whole and split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from colocated_grpo.errors import RunError
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.families import FAMILIES
from tests.support.engines import PROBE, Pair, request_of
from tests.support.families import HYBRIDS, LARGE_STATES, SETTINGS, WHOLE_QUERIES
from tests.support.ranks import run_on_ranks
from tests.support.training_runs import tiny_model

TIMEOUT = 300.0
CLOSE = 2e-5
"""Float32 on both sides, with kernels that add up in different orders."""
ROUNDED = 0.1
"""Bfloat16 on both sides moves single log-probabilities of small models with linear attention by up to 0.07."""


def synced_twice(world: World, folder: Path, bucket_bytes: int | None = None, **changes: Any) -> dict[str, Any]:
    from colocated_grpo.weights import buckets

    buckets.BUCKET_BYTES = bucket_bytes or buckets.BUCKET_BYTES
    pair = Pair(world, folder, **changes)
    pair.write()
    facts: dict[str, Any] = {
        "start": pair.disagreement(),
        "path": "views" if pair.sync.plan is not None else "load_weights",
    }
    moved, after = [], []
    for _ in range(2):
        pair.change_weights()
        moved.append(pair.disagreement())
        pair.write()
        after.append(pair.disagreement())
    pair.engine.close()
    return {**facts, "buckets": len(pair.sync._buckets), "moved": moved, "after": after}


def assert_follows(facts: dict[str, Any]) -> None:
    assert facts["start"] < CLOSE
    assert min(facts["moved"]) > 100 * CLOSE, "the weights moved too little for the test to see a missing sync"
    assert max(facts["after"]) < CLOSE


def synced_in_turn(world: World, folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {architecture: synced_twice(world, folder) for architecture, folder in folders.items()}


@pytest.fixture(scope="module")
def followed() -> dict[str, dict[str, Any]]:
    """Facts about the sync of each family, by architecture, of engines built one after the other in one process."""
    folders = {name: tiny_model(name, edits=edits) for name, edits in SETTINGS.items() if name not in HYBRIDS}
    return run_on_ranks(synced_in_turn, 1, folders, timeout=2 * TIMEOUT)[0]


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if not family.states], ids=lambda family: family.architecture
)
def test_the_engine_follows_the_policy(followed, family):
    facts = followed[family.architecture]
    assert_follows(facts)
    assert facts["path"] == family.path


def synced_in_bfloat16(world: World, folder: Path) -> dict[str, Any]:
    return synced_twice(world, folder, policy={"compute_dtype": "bfloat16"})


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.states], ids=lambda family: family.name)
def test_the_engine_of_a_model_with_linear_attention_follows_the_policy(family):
    folder = tiny_model(family.architecture, head_dim=64, edits=SETTINGS[family.architecture] | LARGE_STATES)
    [facts] = run_on_ranks(synced_in_bfloat16, 1, folder, timeout=TIMEOUT)
    assert facts["path"] == family.path
    assert facts["start"] < ROUNDED
    assert min(facts["moved"]) > 3 * ROUNDED, "the weights moved too little for the test to see a missing sync"
    assert max(facts["after"]) < ROUNDED


EIGHT_BITS = {"dtype": "bfloat16", "args": {"quantization": "fp8_per_channel"}}


def synced_in_8_bits(world: World, folder: Path) -> dict[str, Any]:
    """Return facts of a planned sync, the tensors that a load by vLLM then changes, and the error of each fault."""
    from colocated_grpo.weights import colocated
    from colocated_grpo.weights.transport import ReloadCheck

    pair = Pair(world, folder, engine=EIGHT_BITS)
    pair.write()
    start = pair.disagreement()
    pair.change_weights()
    moved = pair.disagreement()
    pair.write()
    facts: dict[str, Any] = {"start": start, "moved": moved, "after": pair.disagreement()}
    assert pair.sync.plan is not None
    check = ReloadCheck(pair.engine.model, ["every tensor"], world.device)
    facts["changed"] = check.changes(lambda _block: pair.engine.load_weights(pair.sync._full_tensors()))
    write = colocated.buckets.write_planned

    facts["errors"] = {}
    for name in WRONG:

        def faulty(gathered: Any, plan: Any, device: Any, name: str = name) -> None:
            write(gathered, plan, device)
            plan.targets[name].view[3, -1] += 1

        colocated.buckets.write_planned = faulty
        with pytest.raises(RunError) as caught:
            pair.write()
        facts["errors"][name] = str(caught.value)
    pair.engine.close()
    return facts


WRONG = ("model.layers.1.mlp.up_proj.weight_scale", "model.layers.0.self_attn.k_proj.weight")


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_with_fp8_weights_holds_the_bits_that_its_loader_would_write(ranks):
    for facts in run_on_ranks(synced_in_8_bits, ranks, tiny_model(), timeout=TIMEOUT):
        assert max(facts["start"], facts["after"]) < 2 * ROUNDED, facts
        assert facts["moved"] > 3 * ROUNDED, "the weights moved too little for the test to see a missing sync"
        assert facts["changed"] == []
        for name in WRONG:
            assert " in 1 of " in facts["errors"][name] and f"({name})" in facts["errors"][name]


def decoded_by_latent_attention(world: World, folder: Path) -> dict[str, Any]:
    """Change only the projection of which decoding reads rearranged parts. Scoring reads the projection itself."""
    pair, request = Pair(world, folder), request_of(0, seed=3)
    for module in pair.engine.model.modules():
        if hasattr(module, "W_UK_T"):  # views of the projection on this device, where no sync could miss them
            for part in (module.W_UK_T, module.W_UV):
                part.data = part.data.clone()
    pair.write()
    before = pair.generate([request])[0]
    with torch.no_grad():
        for name, parameter in pair.policy.parameters().items():
            if name.endswith("kv_b_proj.weight"):
                parameter.mul_(1.5).add_(0.02)
    pair.policy.weights.publish()
    moved = pair.sampling_error(PROBE, before, 0.7)
    pair.write()
    after = pair.sampling_error(PROBE, pair.generate([request])[0], 0.7)
    pair.engine.close()
    return {"moved": moved, "after": after}


@pytest.mark.parametrize("edits", [{}, WHOLE_QUERIES | {"first_k_dense_replace": 2}], ids=["experts", "dense"])
def test_latent_attention_decodes_with_the_new_weights(edits):
    """Experts are reloaded on CPUs in any case: the dense model shows that latent attention is."""
    folder = tiny_model("deepseek_v3", edits=SETTINGS["deepseek_v3"] | edits)
    [facts] = run_on_ranks(decoded_by_latent_attention, 1, folder, timeout=TIMEOUT)
    assert facts["moved"] > 100 * CLOSE, "the weights moved too little for the test to see a missing sync"
    assert facts["after"] < CLOSE


def decoded_with_copied_sinks(world: World, folder: Path) -> dict[str, Any]:
    """Change only the attention sinks, of which the kernels read a copy, as FlashInfer's do."""
    pair = Pair(world, folder)
    implementations = [module.impl for module in pair.engine.model.modules() if hasattr(module, "impl")]
    for implementation in implementations:
        implementation.sinks = implementation.sinks.detach().float().clone()
    kept = [implementation.sinks.data_ptr() for implementation in implementations]
    pair.write()
    start = pair.disagreement()
    with torch.no_grad():
        for name, parameter in pair.policy.parameters().items():
            if name.endswith("sinks"):
                parameter.mul_(-1.0).add_(2.0)
    pair.policy.weights.publish()
    moved = pair.disagreement()
    pair.write()
    after = pair.disagreement()
    assert kept == [implementation.sinks.data_ptr() for implementation in implementations], "CUDA graphs read these"
    pair.engine.close()
    return {"start": start, "moved": [moved], "after": [after]}


def test_kernels_that_keep_a_copy_of_the_attention_sinks_read_the_new_ones():
    [facts] = run_on_ranks(
        decoded_with_copied_sinks, 1, tiny_model("gpt_oss", edits=SETTINGS["gpt_oss"]), timeout=TIMEOUT
    )
    assert_follows(facts)


@pytest.fixture
def left_by_a_killed_run():
    """Shared memory under the name that vLLM itself would choose: with two ranks it would start no more."""
    memory = Path("/dev/shm/-tp:0-[0-1]-cpushm_0")
    memory.touch()
    yield
    memory.unlink()


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_engines_of_two_ranks_follow_the_policy(tensor_parallel, left_by_a_killed_run):
    ranks = run_on_ranks(synced_on_two_ranks, 2, tiny_model(), tensor_parallel, timeout=TIMEOUT)
    for facts in ranks:
        assert_follows(facts)
        assert facts["path"] == "views"
        assert facts["buckets"] > 3
        shares = tensor_parallel > 1 and facts["has shared memory"]
        assert len(facts["shared memory"]) == (tensor_parallel if shares else 0)
        assert all(name.endswith("(deleted)") for name in facts["shared memory"])


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_an_engine_of_two_ranks_follows_a_policy_with_experts(architecture):
    folder = tiny_model(architecture, edits=SETTINGS[architecture])
    for facts in run_on_ranks(synced_on_two_ranks, 2, folder, 2, timeout=TIMEOUT):
        assert_follows(facts)
        assert facts["path"] == "load_weights"


def synced_on_two_ranks(world: World, folder: Path, tensor_parallel: int) -> dict[str, Any]:
    """With buckets so small that most parameters of the model have one of their own."""
    facts = synced_twice(world, folder, 1 << 14, engine={"tensor_parallel_size": tensor_parallel})
    mapped = Path("/proc/self/maps").read_text().splitlines()
    names = {line.partition("/dev/shm/")[2] for line in mapped if "-tp:0-0-1_" in line}
    # vLLM's build for processors without AVX-512 lacks the operators, and its ranks talk over gloo.
    return facts | {"shared memory": names, "has shared memory": hasattr(torch.ops._C, "init_shm_manager")}


def filled_padding(world: World, folder: Path) -> dict[str, Any]:
    pair = Pair(world, folder)
    pair.write()
    embedding = pair.engine.model.get_parameter("model.embed_tokens.weight").data
    rows = pair.policy.parameters()["model.embed_tokens.weight"].shape[0]
    embedding[rows:] = 7.0
    pair.write()
    facts = {
        "rows": rows,
        "engine rows": len(embedding),
        "padding": embedding[rows:].abs().max().item(),
        "after": pair.disagreement(),
    }
    pair.engine.close()
    return facts


def test_rows_that_pad_the_vocabulary_are_zero_after_a_sync():
    [facts] = run_on_ranks(filled_padding, 1, tiny_model("qwen3", 151), timeout=TIMEOUT)
    assert facts["rows"] == 151
    assert facts["engine rows"] > 151
    assert facts["padding"] == 0
    assert facts["after"] < CLOSE


def synced_by_a_wrong_plan(world: World, folder: Path) -> dict[str, Any]:
    from colocated_grpo.weights import colocated

    build_plan = colocated.build_plan

    def wrong_plan(*arguments: Any) -> Any:
        """Key and value weights change places: shapes fit, values do not."""
        plan = build_plan(*arguments)
        key, value = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv")
        swapped = {key: plan.targets[value], value: plan.targets[key]}
        return replace(plan, targets=plan.targets | swapped)

    colocated.build_plan = wrong_plan
    return synced_twice(world, folder)


def test_a_plan_with_a_wrong_offset_is_not_used():
    [facts] = run_on_ranks(synced_by_a_wrong_plan, 1, tiny_model(), timeout=TIMEOUT)
    assert facts["path"] == "load_weights"
    assert_follows(facts)
