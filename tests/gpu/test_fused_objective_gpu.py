"""Gradients that the head makes in the forward pass, in 16 bits and through the fused kernels, against two passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colocated_grpo.losses import make_chunked_loss, make_loss
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy.objective import fused_objective, packed_tokens, unfused_objective
from colocated_grpo.policy.policy import _to
from colocated_grpo.tools.make_model import make_model
from colocated_grpo.tools.shapes import TINY
from tests.support.small_policy import SHAPE, config_of, gradients_of, pack_for, policy_of, random_groups

pytestmark = pytest.mark.gpu

CLOSE = 0.02
"""Of a gradient's own size: the two ways round their logit gradients to bfloat16 at different places."""


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "cispo"])
def test_both_objectives_give_the_same_loss_metrics_and_gradients_in_16_bits(world, tmp_path, loss):
    folder = make_model(tmp_path / "model", shape=replace(TINY, vocab=SHAPE.vocab), init_std=0.15)
    lengths = {"max_prompt_tokens": 16, "max_completion_tokens": 16}
    config = config_of(folder, loss={"type": loss}, policy={"logprob_chunk_tokens": 64}, rollout=lengths)
    policy = policy_of(config, world)
    [minibatch] = pack_for(world, random_groups(6, 4), config).minibatches
    micro_batch = _to(minibatch.micro_batches[0], world.device)
    # A sampler that is a little off, so that ratios lie inside and outside of the clip range.
    sampled_N = policy.score(micro_batch)
    micro_batch = replace(
        micro_batch, sampling_logprobs_N=sampled_N + 0.2 * micro_batch.loss_inputs.advantages_N.sign()
    )
    assert len(packed_tokens(micro_batch).targets_N) > 64

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
