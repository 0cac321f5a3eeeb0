"""`numerics: exact` on a Hopper GPU: the policy computes the engine's log-probabilities to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from colocated_grpo.metrics import Metrics
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.row_kernels import matmul, rms_norm
from colocated_grpo.settings.exact import EXACT_TYPES
from colocated_grpo.tools.make_model import make_model
from colocated_grpo.tracking import files
from tests.support import sums
from tests.support.families import SETTINGS
from tests.support.real_models import real_model
from tests.support.small_policy import INIT_STD, SHAPE, config_of, pack_for, policy_of, random_groups
from tests.support.training_runs import Row, launch, settings, tiny_model

pytestmark = pytest.mark.gpu

FAMILIES = sorted(kind.removesuffix("_text") for kind in EXACT_TYPES)
HEADS = {"gemma3": 256, "llama": 64}
"""Head sizes of released models; 128 for other families. FlashAttention 3 has other tiles for each."""
EXACT = {"numerics": "exact", "policy": {"compile": "auto"}, "engine": {"enforce_eager": False}}
ROLLOUT = {"prompts_per_step": 8, "group_size": 6, "max_prompt_tokens": 24, "max_completion_tokens": 40}


def assert_exact(rows: list[Row], steps: int) -> None:
    assert [row["step"] for row in rows] == list(range(steps))
    assert [row["mismatch/max"] for row in rows] == [0.0] * steps


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_policy_agree_to_the_last_bit_in_every_step(family, lora, tmp_path):
    model = tiny_model(family, head_dim=HEADS.get(family, 128), edits=SETTINGS.get(family))
    policy = {"compile": "auto", "lora": lora}
    config = settings(model, **EXACT | {"policy": policy, "rollout": ROLLOUT, "training_steps": 3})
    assert_exact(launch(tmp_path, config, gpus=1).rows(files.TRAIN), 3)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "chat"), [("smollm2", True), ("gemma3", False)])
def test_a_pretrained_model_agrees_to_the_last_bit(model, chat, tmp_path):
    config: dict[str, Any] = {
        "model": str(real_model(model)),
        "environments": [sums.entry(tmp_path, 200, chat)],
        "training_steps": 5,
        "rollout": {"max_prompt_tokens": 96, "max_completion_tokens": 700, "temperature": 0.8},
        "numerics": "exact",
        "run_name": "run",
    }
    assert_exact(launch(tmp_path, config, gpus=1).rows(files.TRAIN), 5)


def small_model(folder: Path) -> Path:
    return make_model(folder / "model", architecture="llama", shape=replace(SHAPE, head_dim=64), init_std=INIT_STD)


def test_log_probabilities_do_not_depend_on_the_micro_batch(world, tmp_path):
    config = config_of(small_model(tmp_path), numerics="exact")
    policy, groups = policy_of(config, world), random_groups(3, 3)

    def scored(size: int) -> torch.Tensor:
        (minibatch,) = pack_for(world, groups, config.with_micro_batches(size)).minibatches
        # Micro-batches order the sequences differently.
        return torch.cat([policy.score(each) for each in minibatch.micro_batches]).sort().values

    assert torch.equal(scored(32), scored(1024))


def test_gradients_are_as_close_to_those_of_float32_as_with_fast_numerics(world, tmp_path):
    folder = small_model(tmp_path)
    expected = gradients(world, folder, "fast", "float32")
    fast, exact = (gradients(world, folder, numerics, "bfloat16") for numerics in ("fast", "exact"))
    assert (exact - expected).norm() < 1.2 * (fast - expected).norm()


def gradients(world: World, folder: Path, numerics: str, dtype: str) -> torch.Tensor:
    config = config_of(folder, numerics=numerics, policy={"compute_dtype": dtype, "compile": False})
    policy = policy_of(config, world)
    policy.forward_backward(pack_for(world, random_groups(3, 3), config).minibatches[0], Metrics(world.device))
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters().values()])


@pytest.mark.parametrize("depth", [576, 640, 2048])
def test_a_row_of_a_product_or_a_norm_does_not_depend_on_the_other_rows(depth):
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(n, depth, device="cuda", generator=generator).bfloat16() for n in (5000, 1000))
    residual = torch.randn(x.shape, device="cuda", generator=generator).bfloat16()
    total = x + residual
    product, norm = matmul(x, weight), rms_norm(total, weight[0], 1e-6, 0.0)
    for rows in (1, 3, 16, 64, 257, 4096):
        assert torch.equal(matmul(x[:rows], weight), product[:rows])
        assert torch.equal(matmul(x[:rows], weight[128:400]), product[:rows, 128:400])
        assert torch.equal(rms_norm(x[:rows], weight[0], 1e-6, 0.0, residual[:rows].clone()), norm[:rows])
