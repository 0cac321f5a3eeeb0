"""Compute weights that outlive a micro-batch on one rank are never older than the weights they are made of."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import DTensor

from colocated_grpo.metrics import Metrics
from colocated_grpo.policy import model as model_module
from tests.support.small_policy import assert_same, config_of, pack_for, policy_of, random_groups, train, weights_of


def steps(world, folder, count: int):
    config = config_of(folder, batch={"max_tokens_per_micro_batch": 60}, policy={"lr": 1e-3})
    policy = policy_of(config, world)
    batch = pack_for(world, random_groups(4, 3), config)
    assert len(batch.minibatches[0].micro_batches) > 1
    train(policy, batch, steps=count)
    return policy, batch


def test_training_is_the_same_as_with_weights_gathered_for_every_pass(world, model_folder, monkeypatch):
    folder = model_folder()
    kept, _ = steps(world, folder, 3)
    monkeypatch.setattr(model_module.FSDPModule, "set_reshard_after_forward", lambda *_: None)
    monkeypatch.setattr(model_module.FSDPModule, "set_reshard_after_backward", lambda *_: None)
    freed, _ = steps(world, folder, 3)
    assert_same(weights_of(kept), weights_of(freed), rtol=0, atol=0)


@pytest.mark.parametrize("use", ["train", "score"])
def test_only_shards_are_left_after_each_use(world, model_folder, use):
    policy, batch = steps(world, model_folder(), 1)
    if use == "train":
        policy.forward_backward(batch.minibatches[0], Metrics(world.device))
    else:
        policy.score(batch.minibatches[0].micro_batches[0])
    assert all(isinstance(parameter, DTensor) for parameter in policy.model.parameters())
