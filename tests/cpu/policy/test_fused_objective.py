"""The loss in parts, as the fused head asks for it, against the loss in one piece."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from colocated_grpo.batching.micro_batch import TrainSequence, build_micro_batch
from colocated_grpo.losses.objectives import make_chunked_loss, make_loss
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy.policy import fused_objective, unfused_objective
from colocated_grpo.settings.losses import CorrectionConfig, GRPOConfig, GSPOConfig
from tests.support.loss_inputs import ALL_LOSSES, BUSY_SETTINGS, loss_and_gradient, random_inputs
from tests.support.small_policy import config_of, gradients_of, make_small_model, policy_of


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    size=st.integers(1, 12),
    config_class=st.sampled_from([config for config in ALL_LOSSES if config is not GSPOConfig]),
    busy=st.sampled_from([{}, *BUSY_SETTINGS]),
    on_policy=st.booleans(),
)
def test_chunks_add_up_to_the_loss_and_its_gradient(seed, lengths, size, config_class, busy, on_policy):
    config, inputs = config_class(**busy), random_inputs(seed, lengths)
    inputs = replace(inputs, old_logprobs_N=None) if on_policy else inputs
    chunked_loss = make_chunked_loss(config)
    if chunked_loss is None:
        assert config.correction.level == "sequence"
        return
    chunk_loss = chunked_loss(inputs)
    total, leaf = torch.zeros(()), inputs.logprobs_N
    for start in range(0, sum(lengths), size):
        tokens = slice(start, start + size)
        total = total + chunk_loss(tokens, leaf[tokens])
    loss, gradient = loss_and_gradient(config, inputs)
    assert_close(total.detach(), loss, rtol=1e-5, atol=1e-5)
    assert_close(torch.autograd.grad(total, leaf)[0], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [GSPOConfig(), GRPOConfig(correction=CorrectionConfig(level="sequence"))])
def test_a_loss_that_mixes_tokens_of_a_sequence_cannot_be_chunked(config):
    assert make_chunked_loss(config) is None


def sequences_of(lengths: list[int]) -> list[TrainSequence]:
    """Two prompt tokens each, then tokens with a small sampler-trainer mismatch."""
    rng = random.Random(0)
    return [
        TrainSequence(
            token_ids=np.array([rng.randrange(3, 150) for _ in range(length + 2)]),
            scored=np.arange(2, length + 2),
            sampling_logprobs=np.array([-5.0 + rng.uniform(-0.4, 0.4) for _ in range(length)], np.float32),
            advantages=np.full(length, rng.uniform(-2, 2), np.float32),
            temperature=0.9,
            trained=True,
        )
        for length in lengths
    ]


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "cispo"])
def test_fused_and_unfused_objectives_give_the_same_loss_metrics_and_gradients(world, tmp_path, loss):
    folder = make_small_model(tmp_path / "model", "qwen3")
    config = config_of(folder, loss={"type": loss}, policy={"logprob_chunk_tokens": 3})
    policy = policy_of(config, world)
    micro_batch = build_micro_batch(sequences_of([7, 4, 9]))
    loss_fn = make_loss(config.loss)
    results = []
    for objective in (unfused_objective(loss_fn), fused_objective(loss_fn, make_chunked_loss(config.loss))):
        value, stats = objective(policy.model, micro_batch, 5.0)
        value.backward()
        metrics = Metrics("cpu")
        metrics.add(stats)
        gradients = gradients_of(policy)
        policy.optimizer.zero_grad()
        results.append((value.detach(), reduce(metrics, lambda _: None, lambda _: None), gradients))
    (a, metrics_a, gradients_a), (b, metrics_b, gradients_b) = results
    assert_close(a, b)
    assert metrics_a.keys() == metrics_b.keys()
    for name, value in metrics_a.items():
        assert value == pytest.approx(metrics_b[name], rel=1e-5, abs=1e-7), name
    for name, gradient in gradients_a.items():
        assert gradient.abs().max() > 0
        assert_close(gradient, gradients_b[name], rtol=1e-4, atol=1e-6)
