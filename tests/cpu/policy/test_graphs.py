"""Micro-batches that are padded to the fixed shape of a CUDA graph give the same loss, statistics and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colocated_grpo.batching.pack import Minibatch
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy.attention import with_own_keys
from colocated_grpo.policy.graphs import padded, pays_off, shape_for
from tests.support.small_policy import (
    assert_same,
    config_of,
    gradients_of,
    make_small_model,
    pack_for,
    policy_of,
    random_groups,
    rounding,
    with_ref_logprobs,
)

LOSSES = {
    "token sum": {"type": "dapo"},
    "completion mean": {"type": "grpo"},
    "ratio of a whole completion": {"type": "gspo"},
    "penalty": {"type": "dapo", "kl": {"coef": 0.1}},
}


def with_keys(micro_batch):
    return replace(micro_batch, tokens=with_own_keys(micro_batch.tokens))


def results(policy, minibatch):
    metrics = Metrics(policy.device)
    policy.forward_backward(minibatch, metrics)
    found = gradients_of(policy)
    for parameter in policy.parameters().values():
        parameter.grad = None
    nothing = lambda _: None  # noqa: E731
    return found, reduce(metrics, nothing, nothing)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("shares", [True, False], ids=["common prefixes", "no common prefixes"])
def test_padding_changes_neither_gradients_nor_statistics(tmp_path, world, loss, shares):
    config = config_of(
        make_small_model(tmp_path / "model", "gemma3"),  # windows of attention
        loss=loss,
        batch={"max_tokens_per_micro_batch": 60},
        rollout={"max_prompt_tokens": 16, "max_completion_tokens": 16},
    )
    policy = policy_of(config, world)
    [minibatch] = pack_for(world, random_groups(6, 4 if shares else 1), config).minibatches
    plain = [with_ref_logprobs(with_keys(each)) for each in minibatch.micro_batches]
    fixed = [padded(each, shape_for(each)) for each in plain]
    assert all(each.tokens.num_tokens == shape_for(each).rows for each in fixed)
    (expected, wanted), (found, metrics) = (
        results(policy, Minibatch(micro_batches=parts, counts=minibatch.counts)) for parts in (plain, fixed)
    )
    assert_same(found, expected, rtol=0, atol=rounding(expected))
    assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_a_padded_micro_batch_has_at_most_half_as_many_tokens_again_and_a_few_shapes_serve_all_sizes(world, tmp_path):
    config = config_of(
        make_small_model(tmp_path / "model", "qwen3"), rollout={"max_prompt_tokens": 16, "max_completion_tokens": 16}
    )
    shapes = set()
    for groups in range(8, 40):
        [minibatch] = pack_for(world, random_groups(groups, 4, seed=groups), config).minibatches
        for micro_batch in map(with_keys, minibatch.micro_batches):
            shapes.add(shape := shape_for(micro_batch))
            assert shape.rows <= max(64, 1.5 * micro_batch.tokens.num_tokens + 64)
            assert shape_for(padded(micro_batch, shape))[:2] == shape[:2]
    assert len(shapes) <= 12


def test_graphs_serve_small_models_and_small_micro_batches():
    assert pays_off(134_515_008, 30, 8_192)
    assert not pays_off(134_515_008, 30, 65_536)
    assert not pays_off(596_049_920, 28, 24_576)
