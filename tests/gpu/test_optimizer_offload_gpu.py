"""Optimizer state in host memory during generation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from colocated_grpo.tools.shapes import TINY
from tests.support.random_models import make_model
from tests.support.small_policy import (
    SHAPE,
    assert_same,
    config_of,
    pack_for,
    policy_of,
    random_groups,
    train,
    weights_of,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("weights", ["copied", "shared"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "adamw_8bit"])
def test_offloading_between_steps_changes_no_weight_and_reuses_its_host_buffers(world, tmp_path, optimizer, weights):
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    torch.use_deterministic_algorithms(True, warn_only=True)  # otherwise atomic additions differ in order
    model = make_model(tmp_path / "model", shape=replace(TINY, vocab=SHAPE.vocab), init_std=0.15)
    policy_settings = {"lr": 1e-2, "optimizer": {"type": optimizer}, "offload_optimizer": True, "compile": "off"}
    config = config_of(model, weights=weights, policy=policy_settings)
    moved, resident = policy_of(config, world), policy_of(config, world)
    batch = pack_for(world, random_groups(2, 3), config)
    buffers = []
    for _ in range(3):
        for policy in (moved, resident):
            train(policy, batch)
        moved.offload.to_host()
        buffers.append(len(moved.offload._host))
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in moved.offload._host)
        moved.offload.to_device()
    assert buffers[0] == buffers[-1] > 0
    torch.cuda.synchronize()
    assert_same(weights_of(moved), weights_of(resident), rtol=0, atol=0)
