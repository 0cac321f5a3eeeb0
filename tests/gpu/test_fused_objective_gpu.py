"""The fused objective with Triton kernels in 16 bits equals the unfused one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colocated_grpo.losses.objectives import make_chunked_loss, make_loss
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy.policy import _on_device, fused_objective, unfused_objective
from colocated_grpo.tools.shapes import TINY
from tests.support.random_models import make_model
from tests.support.small_policy import SHAPE, config_of, gradients_of, pack_for, policy_of, random_groups

pytestmark = pytest.mark.gpu

CLOSE = 0.02
"""Relative difference of gradients: the two round logit gradients to bfloat16 at different places."""


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "cispo"])
def test_fused_and_unfused_objectives_give_the_same_loss_metrics_and_gradients_in_16_bits(world, tmp_path, loss):
    folder = make_model(tmp_path / "model", shape=replace(TINY, vocab=SHAPE.vocab), init_std=0.15)
    lengths = {"max_prompt_tokens": 16, "max_completion_tokens": 16}
    config = config_of(folder, loss={"type": loss}, policy={"logprob_chunk_tokens": 64}, rollout=lengths)
    policy = policy_of(config, world)
    [minibatch] = pack_for(world, random_groups(6, 4), config).minibatches
    micro_batch = _on_device(minibatch.micro_batches[0], world.device)
    # A small sampler-trainer mismatch, so that ratios are inside and outside of the clip range.
    sampled_N = policy.score(micro_batch)
    inputs = micro_batch.loss_inputs
    inputs = replace(inputs, sampling_logprobs_N=sampled_N + 0.2 * inputs.advantages_N.sign())
    micro_batch = replace(micro_batch, loss_inputs=inputs)
    assert len(micro_batch.tokens.targets_N) > 64

    loss_fn = make_loss(config.loss)
    results = []
    for objective in (unfused_objective(loss_fn), fused_objective(loss_fn, make_chunked_loss(config.loss))):
        value, stats = objective(policy.model, micro_batch, 50.0)
        value.backward()
        metrics = Metrics(world.device)
        metrics.add(stats)
        results.append((value.item(), reduce(metrics, lambda _: None, lambda _: None), gradients_of(policy)))
        policy.optimizer.zero_grad()
    (a, metrics_a, gradients_a), (b, metrics_b, gradients_b) = results
    assert a == pytest.approx(b, rel=1e-2)
    for name, value in metrics_a.items():
        assert value == pytest.approx(metrics_b[name], rel=2e-2, abs=1e-3), name
    for name, gradient in gradients_a.items():
        assert gradient.norm() > 0
        assert (gradient - gradients_b[name]).norm() <= CLOSE * gradient.norm(), name
