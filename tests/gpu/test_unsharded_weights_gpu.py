"""On one device, unsharded weights give the same gradients as FSDP: compiled blocks, 16 bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from colocated_grpo.metrics import Metrics
from colocated_grpo.runtime.distributed import World
from colocated_grpo.tools.shapes import TINY
from tests.support.random_models import make_model
from tests.support.small_policy import SHAPE, config_of, gradients_of, pack_for, policy_of, random_groups

pytestmark = pytest.mark.gpu

CLOSE = 0.02
"""Relative difference of gradients: atomic additions, and kernels fused differently, round in different orders."""


def gradients_with(settings: dict[str, bool], folder: Path, world: World) -> dict[str, Tensor]:
    """Return the gradients of several micro-batches."""
    lengths = {"max_prompt_tokens": 16, "max_completion_tokens": 16}
    config = config_of(folder, policy=settings, batch={"max_tokens_per_micro_batch": 36}, rollout=lengths)
    policy = policy_of(config, world)
    [minibatch] = pack_for(world, random_groups(6, 4), config).minibatches
    assert len(minibatch.micro_batches) > 4
    policy.forward_backward(minibatch, Metrics(world.device))
    return gradients_of(policy)


def test_gradients_with_unsharded_weights_equal_those_of_fsdp(world, tmp_path):
    folder = make_model(tmp_path / "model", shape=replace(TINY, vocab=SHAPE.vocab), init_std=0.15)
    plain, sharded = (gradients_with({"cpu_offload": offloaded}, folder, world) for offloaded in (False, True))
    differences = {
        name: ((plain[name].cpu() - expected).norm() / expected.norm()).item() for name, expected in sharded.items()
    }
    assert all(difference <= CLOSE for difference in differences.values()), differences
