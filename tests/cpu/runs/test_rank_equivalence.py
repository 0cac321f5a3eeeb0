"""The update does not depend on the number of ranks, the micro-batches, or an uneven split."""

from __future__ import annotations

import pytest
import torch

from colocated_grpo.batching.pack import pack
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.runtime.distributed import World
from tests.support.ranks import run_on_ranks
from tests.support.small_policy import (
    assert_same,
    config_of,
    gradients_of,
    group_of,
    pack_for,
    policy_of,
    random_groups,
    rollout_of,
    train,
    weights_of,
    with_own_advantages,
)

LOSSES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "gspo"]
ONE_FORWARD = 10_000
"""Micro-batch size in tokens that fits every batch here."""
CUTS = {"several micro-batches": 40, "one sequence a micro-batch": 18}
STEPS = 5
# With a KL penalty, clipping and importance correction, no loss term is trivially linear.
LOSS_SETTINGS = {"kl": {"coef": 0.1, "target": "rollout"}, "correction": {"mode": "truncate"}}


def loss_config(folder, loss: str, budget: int, **sections):
    batch = {"max_tokens_per_micro_batch": budget, **sections.pop("batch", {})}
    return config_of(folder, loss={"type": loss, **LOSS_SETTINGS}, batch=batch, **sections)


def one_gradient(world: World, folder, loss: str, budget: int, groups, constant=None) -> dict:
    """Return the gradient of one minibatch, its metrics, and what was packed."""
    config = loss_config(folder, loss, budget)
    policy = policy_of(config, world)
    metrics = Metrics(world.device)
    batch = pack_for(world, groups, config, constant)
    policy.forward_backward(batch.minibatches[0], metrics)
    loss_inputs = [micro_batch.loss_inputs for micro_batch in batch.minibatches[0].micro_batches]
    return {
        "gradient": gradients_of(policy),
        "metrics": reduce(metrics, world.sum_, world.max_),
        "micro_batches": len(loss_inputs),
        "sequences": sum(inputs.num_sequences for inputs in loss_inputs if inputs.loss_mask_N.any()),
    }


def gradients_of_all_losses(world: World, folder, groups) -> dict:
    return {
        (loss, name): one_gradient(world, folder, loss, budget, groups)
        for loss in LOSSES
        for name, budget in CUTS.items()
    }


def assert_same_update(actual: dict, expected: dict) -> None:
    assert_same(actual["gradient"], expected["gradient"], rtol=1e-5, atol=1e-6)
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)


def test_the_gradient_does_not_depend_on_ranks_or_micro_batches(world, model_folder):
    groups = random_groups(4, 3)
    folder = model_folder()
    whole_batch = {loss: one_gradient(world, folder, loss, ONE_FORWARD, groups) for loss in LOSSES}
    assert all(result["micro_batches"] == 1 for result in whole_batch.values())
    assert all(max(g.abs().max() for g in r["gradient"].values()) > 1e-3 for r in whole_batch.values())
    here = gradients_of_all_losses(world, folder, groups)
    there = run_on_ranks(gradients_of_all_losses, 2, folder, groups)
    for results in (here, *there):
        for (loss, _), result in results.items():
            assert result["micro_batches"] > 1
            assert_same_update(result, whole_batch[loss])


def uneven_gradients(world: World, folder, groups, one_sequence) -> dict:
    return {
        "three sequences": one_gradient(world, folder, "grpo", 18, groups),
        "one rank without work": one_gradient(world, folder, "grpo", ONE_FORWARD, one_sequence),
        "a constant group": one_gradient(world, folder, "grpo", ONE_FORWARD, groups[:1] * 2, [False, True]),
    }


def test_uneven_splits_and_ranks_without_work_do_not_change_the_gradient(world, model_folder):
    folder = model_folder()
    three = random_groups(1, 3)
    one_sequence = [group_of(0, [rollout_of([1, 2, 3], [4, 5, 6, 7])])]
    results = run_on_ranks(uneven_gradients, 2, folder, three, one_sequence)
    assert sorted(result["one rank without work"]["sequences"] for result in results) == [0, 1]
    assert sum(result["three sequences"]["sequences"] for result in results) == 3
    for name, expected in uneven_gradients(world, folder, three, one_sequence).items():
        for result in results:
            assert_same_update(result[name], expected)


def test_dropping_a_group_of_equal_rewards_does_not_change_the_gradient(world, model_folder):
    groups = with_own_advantages(random_groups(2, 3))
    equal = group_of(2, [rollout_of([1, 2], [3] * length) for length in (3, 5, 7)])
    config = config_of(model_folder(), loss={"type": "grpo"})
    gradients = []
    for constant in (False, True):
        policy = policy_of(config, world)
        zeros, without_gradient = [[0.0] * 3] * 3, [False, False, constant]
        batch = pack([*groups, equal], zeros, without_gradient, config.batch, rank=0, world_size=1, shuffle_seed=0)
        policy.forward_backward(batch.minibatches[0], Metrics(world.device))
        gradients.append(gradients_of(policy))
    assert_same(gradients[1], gradients[0], rtol=1e-5, atol=1e-7)


def trained_weights(world: World, folder, groups) -> dict:
    """Return the weights after five optimizer steps with old log-probabilities and two minibatches per batch."""
    results = {}
    for loss in ("grpo", "dr_grpo", "dapo", "gspo"):
        # Adam divides by the gradient's size: with a small eps, a gradient of rounding noise would be a large update.
        policy_settings = {"lr": 1e-2, "warmup_steps": 2, "grad_clip": 0.1, "optimizer": {"eps": 1e-3}}
        config = loss_config(folder, loss, 40, policy=policy_settings, batch={"minibatches": 2})
        policy = policy_of(config, world)
        batch = pack_for(world, groups, config)
        while policy.version < STEPS:
            train(policy, policy.with_old_logprobs(batch))
        results[loss] = weights_of(policy)
    return results


def test_training_on_two_ranks_ends_with_the_weights_of_one_rank(world, model_folder):
    groups = random_groups(4, 3)
    folder = model_folder()
    expected = trained_weights(world, folder, groups)
    start = weights_of(policy_of(config_of(folder), world))
    for result in run_on_ranks(trained_weights, 2, folder, groups):
        for loss, weights in expected.items():
            assert all(not torch.equal(weights[name], start[name]) for name in start)
            assert_same(result[loss], weights, rtol=1e-5, atol=1e-5)


def scores_around_an_update(world: World, folder, groups) -> tuple:
    """Return log-probabilities and gradients around an update, of a policy that scored before it and one that did not.

    The last forward before the update has no gradient, so no backward pass frees its gathered weights.
    """
    config = config_of(folder, policy={"lr": 1e-2})
    batch = pack_for(world, groups, config)
    micro_batch = batch.minibatches[0].micro_batches[0]
    metrics = Metrics(world.device)
    scored, plain = policy_of(config, world), policy_of(config, world)
    for policy in (scored, plain):
        policy.forward_backward(batch.minibatches[0], metrics)
    before = scored.score(micro_batch)
    for policy in (scored, plain):
        policy.optimizer_step(metrics)
    results = before, scored.score(micro_batch), plain.score(micro_batch)
    gradients = []
    for policy in (scored, plain):
        policy.forward_backward(batch.minibatches[0], metrics)
        gradients.append(gradients_of(policy))
    return *results, *gradients


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_after_an_update_uses_the_new_weights_even_if_the_old_ones_were_scored(
    world, model_folder, world_size
):
    arguments = model_folder(), random_groups(2, 3)
    one_rank = world_size == 1
    results = (
        [scores_around_an_update(world, *arguments)]
        if one_rank
        else run_on_ranks(scores_around_an_update, 2, *arguments)
    )
    for before, scored, plain, gradient, plain_gradient in results:
        assert (plain - before).abs().max() > 1e-2
        torch.testing.assert_close(scored, plain, rtol=0, atol=0)
        assert_same(gradient, plain_gradient, rtol=0, atol=0)
