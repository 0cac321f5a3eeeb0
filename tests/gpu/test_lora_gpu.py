"""Adapters on a GPU: the merge kernel, compiled gradients, and runs whose engine has the trainer's merged weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.workload import MAX_PROMPT_TOKENS, TASK
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.lora.linear import dithered, random_16_bits
from colocated_grpo.policy.lora.weights import merge
from tests.support.random_models import make_model
from tests.support.small_policy import INIT_STD, SHAPE, config_of, pack_for, policy_of, random_groups
from tests.support.training_runs import launch, settings, tiny_model

pytestmark = pytest.mark.gpu

SHAPES = [(7, 33, 1), (300, 520, 8), (1000, 768, 48)]


def random_parts(rows: int, columns: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    sizes = [(rows, columns, 0.02), (rows, rank, 1e-3), (rank, columns, 0.02)]
    base, left, right = (torch.randn(r, c, generator=generator) * std for r, c, std in sizes)
    return [base.to(dtype), left, right]


@pytest.mark.parametrize("key", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_merges_as_the_cpu_does(shape, dtype, key):
    parts = random_parts(*shape, dtype)
    expected = torch.empty_like(parts[0])
    merge(expected, *parts, 2.0, key=key)
    on_gpu = [part.cuda() for part in parts]
    actual = torch.empty_like(on_gpu[0])
    merge(actual, *on_gpu, 2.0, key=key)
    if dtype == torch.float32:
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-7)
    else:  # the last bit of a product changes a rounding here and there
        assert (actual.cpu() != expected).float().mean() < 1e-3
        torch.testing.assert_close(actual.cpu(), expected, rtol=2**-7, atol=0)


def test_the_kernel_merges_transposed_factors_rows_of_a_weight_and_strided_outputs():
    base, left, right = (part.cuda() for part in random_parts(300, 520, 8, torch.bfloat16))
    whole, fused = torch.empty_like(base), torch.empty(300, 1040, dtype=base.dtype, device="cuda")
    merge(whole, base, left, right, 1.0, key=3)
    merge(fused[:, 520:], base, left.t().contiguous().t(), right.t().contiguous().t(), 1.0, key=3)
    assert torch.equal(fused[:, 520:], whole)
    rows = torch.empty_like(base[128:])
    merge(rows, base[128:], left[128:], right, 1.0, key=3, first=128 * 520)
    assert torch.equal(rows, whole[128:])


def test_a_zero_adapter_leaves_the_base_as_it_is():
    base, left, right = (part.cuda() for part in random_parts(300, 520, 8, torch.bfloat16))
    merged = torch.empty_like(base)
    merge(merged, base, torch.zeros_like(left), right, 1.0, key=3)
    assert torch.equal(merged, base)


def test_the_dither_is_the_same_on_both_devices():
    on_cpu, on_gpu = (random_16_bits(100_000, 7, 12345, torch.device(name)) for name in ("cpu", "cuda"))
    assert torch.equal(on_cpu, on_gpu.cpu())
    values = torch.randn(1000, 50)
    assert torch.equal(dithered(values, 3), dithered(values.cuda(), 3).cpu())


@pytest.mark.parametrize("weights", ["copied", "shared"])
def test_compiled_gradients_equal_those_of_float32(world, tmp_path, weights):
    folder = make_model(tmp_path / "model", shape=replace(SHAPE, head_dim=64), init_std=INIT_STD)
    gradients = {}
    for dtype, compiled in (("float32", "off"), ("bfloat16", "on")):
        config = config_of(
            folder,
            weights=weights,
            policy={"lora": {"rank": 4}, "compute_dtype": dtype, "compile": compiled},
            batch={"max_tokens_per_micro_batch": 36},
            rollout={"max_prompt_tokens": 16, "max_completion_tokens": 16},
        )
        policy = policy_of(config, world)
        generator = torch.Generator().manual_seed(1)
        for parameter in policy.parameters().values():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        policy.weights.publish()
        policy.forward_backward(pack_for(world, random_groups(6, 4), config).minibatches[0], Metrics(world.device))
        gradients[dtype] = {name: parameter.grad for name, parameter in policy.parameters().items()}
    differences = {
        name: ((gradients["bfloat16"][name] - expected).norm() / expected.norm()).item()
        for name, expected in gradients["float32"].items()
    }
    assert max(differences.values()) < 0.1, differences
    assert sum(differences.values()) / len(differences) < 0.04, differences


def lora_settings(**changes):
    """Three steps whose rewards differ within every group, so that each moves the adapter."""
    wanted = {
        "policy": {"lora": {"rank": 8}},
        "environments": [{"type": "task", "name": TASK}],
        "rollout": {"max_prompt_tokens": MAX_PROMPT_TOKENS, **changes.pop("rollout", {})},
        "training_steps": 3,
    }
    return settings(tiny_model(head_dim=64), **wanted | changes)


@pytest.mark.parametrize(
    "changes", [{"weights": "shared"}, {}, {"policy": {"lora": {"rank": 8, "base_on_host": True}}}]
)
def test_a_run_trains_and_its_engine_agrees_with_the_policy(tmp_path, changes):
    run = launch(tmp_path, lora_settings(**changes), gpus=1)
    rows = run.rows("train")
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["mismatch/plain"] < 0.02 for row in rows)
    assert (run.folder / "final_adapter" / "adapter_model.safetensors").exists()


@pytest.mark.multigpu(2)
def test_two_gpus_train_as_one(tmp_path):
    rows = {}
    for gpus in (1, 2):
        wanted = lora_settings(rollout={"generation": "replicated"}, loss={"kl": {"coef": 0.01}})
        run = launch(tmp_path / str(gpus), wanted, gpus=gpus)
        rows[gpus] = run.rows("train")
        assert all(row["mismatch/plain"] < 0.02 for row in rows[gpus])
    # The first step sees the same completions; later ones may differ in the last bits, and then in a token.
    assert rows[2][0]["grad_norm"] == pytest.approx(rows[1][0]["grad_norm"], rel=0.05)
