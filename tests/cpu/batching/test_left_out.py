"""Metrics over all trained tokens, also of groups without a gradient that the forward pass leaves out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from colocated_grpo.batching.pack import Batch, LeftOut, left_out, pack
from colocated_grpo.batching.plan import Outline
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.schema import Config
from colocated_grpo.types import Group
from tests.support.small_policy import config_of, group_of, make_small_model, policy_of, random_groups, rollout_of


def packed(world: World, groups: list[Group], config: Config, without_gradient: list[bool]) -> Batch:
    advantages = [[1.0, -1.0, 0.5] if not constant else [0.0] * 3 for constant in without_gradient]
    ranks = {"rank": world.rank, "world_size": world.size}
    return pack(groups, advantages, without_gradient, config.batch, shuffle_seed=0, **ranks)


def with_logprob(group: Group, logprob: float) -> Group:
    """Return the group with this log-probability for each sampled token."""
    return replace(
        group,
        rollouts=[replace(r, sampling_logprobs=[logprob * kept for kept in r.loss_mask]) for r in group.rollouts],
    )


def test_entropy_and_clip_fractions_count_the_tokens_of_groups_that_are_left_out(world, tmp_path):
    keep = {"drop_constant_groups": False}
    loss = {"type": "dapo", "old_logprobs": "sampling", "correction": {"mode": "off"}}
    config = config_of(make_small_model(tmp_path / "model", "qwen3"), loss=loss)
    policy = policy_of(config, world)
    # Ratios against these log-probabilities are far from 1, so that half of the tokens are clipped.
    varied, *constant = [with_logprob(group, -2.0) for group in random_groups(3, 3, seed=4)]

    def measured(batch: Batch) -> dict[str, float]:
        metrics = Metrics(world.device)
        for minibatch in batch.minibatches:
            policy.forward_backward(minibatch, metrics)
        return reduce(metrics, world.sum_, world.max_)

    everything = config.model_copy(update={"batch": config.batch.model_copy(update=keep)})
    # The estimate is exact if each sampled token's log-probability is minus the entropy.
    entropies = [measured(packed(world, [group], everything, [True]))["entropy"] for group in constant]
    constant = [with_logprob(group, -entropy) for group, entropy in zip(constant, entropies, strict=True)]
    groups, without_gradient = [varied, *constant], [False, True, True]
    with_all = measured(packed(world, groups, everything, without_gradient))
    without = measured(packed(world, groups, config, without_gradient))
    for name in ("entropy", "clip_fraction/low", "clip_fraction/high"):
        assert without[name] == pytest.approx(with_all[name], rel=1e-5), name
    assert with_all["clip_fraction/low"] > 0.01
    assert measured(packed(world, constant, config, [True, True]))["entropy"] > 0


def test_only_trained_tokens_with_known_log_probabilities_count():
    rollouts = [
        rollout_of([1, 2], [3, 4, 5, 6], observed=1, logprob=-0.5),
        rollout_of([1, 2], [3], logprob=math.nan),
        replace(rollout_of([1, 2], [3, 4]), sampling_logprobs=None),
        rollout_of([1, 2], [3, 4], logprob=-0.5),
    ]
    outlines = [
        Outline(group=0, sibling=place, length=len(one.token_ids), scored=sum(one.loss_mask), trained=place < 3)
        for place, one in enumerate(rollouts)
    ]
    assert left_out([group_of(0, rollouts)], outlines) == LeftOut(tokens=6, known=3, surprisal=1.5)
