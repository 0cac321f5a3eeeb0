"""Load-balancing loss: the gradient of its formula is added to that of the policy, however the blocks are run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from colocated_grpo.batching.micro_batch import build_micro_batch
from colocated_grpo.batching.pack import Minibatch
from colocated_grpo.losses.inputs import Counts
from colocated_grpo.metrics import Metrics, Stat, reduce
from colocated_grpo.policy import masters, routing
from colocated_grpo.policy.activations import StepSettings, run_trial_step
from colocated_grpo.policy.blocks import blocks_of
from colocated_grpo.policy.policy import Policy
from colocated_grpo.policy.routing import WEIGHTS, sigmoid_weights
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.families import FAMILIES
from colocated_grpo.trainer import make_batch, with_advantages
from colocated_grpo.types import Group
from tests.support.families import SETTINGS
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
    whole,
    with_old_logprobs,
)

COEFFICIENT = 0.5
EXPERTS, CHOSEN = 4, 2
METRIC = "loss/load_balancing"
ARCHITECTURES = [family.architecture for family in FAMILIES if family.experts]
Result = tuple[dict[str, Tensor], dict[str, float]]
"""Gradients and metrics."""


def computed(
    world: World, folder: Path, groups: Sequence[Group] | None = None, budget: int = 64, **policy: Any
) -> Result:
    """Return the result of a minibatch, by default of several micro-batches with common prefixes."""
    config = config_of(folder, policy=policy, batch={"max_tokens_per_micro_batch": budget})
    groups = random_groups(6, 4) if groups is None else groups
    minibatch = pack_for(world, groups, config).map(with_old_logprobs).minibatches[0]
    return result_of(policy_of(config, world), minibatch, world)


def with_the_formula(world: World, folder: Path, groups: Sequence[Group] | None = None, **policy: Any) -> Result:
    """Return the result of one micro-batch of all sequences, each with its own prompt, with the formula added.

    The formula is written with plain operations on the logits of the routers that train.
    """
    config = config_of(folder, policy=policy)
    trained = policy_of(config, world)
    minibatch = pack_for(world, alone(random_groups(6, 4) if groups is None else groups), config).minibatches[0]
    [micro_batch] = minibatch.micro_batches
    assert micro_batch.tokens.prefix_keys is None
    sigmoid = WEIGHTS[trained.model.lm.config.model_type] is sigmoid_weights
    formula = balance_of_scores if sigmoid else balance_of_transformers
    seen: list[Any] = []
    for router in routers_of(trained):
        if any(parameter.requires_grad for parameter in router.parameters()):
            router.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    objective = trained._objective

    def and_formula(*arguments: Any) -> Any:
        loss, stats = objective(*arguments)
        balance = torch.stack([formula(logits, experts) for logits, _, experts in seen]).mean()
        return loss + COEFFICIENT * balance, stats | {METRIC: Stat.mean(balance.detach(), 1.0)}

    trained._objective = and_formula
    return result_of(trained, replace(minibatch, micro_batches=[with_old_logprobs(micro_batch)]), world)


def alone(groups: Sequence[Group]) -> list[Group]:
    """Return each rollout as a group of its own, so that no prefix is computed for several of them."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [group_of(index, [rollout]) for index, rollout in enumerate(rollouts)]


def result_of(policy: Policy, minibatch: Minibatch, world: World) -> Result:
    metrics = Metrics(policy.device)
    policy.forward_backward(minibatch, metrics)
    return gradients_of(policy), reduce(metrics, world.sum_, world.max_)


def balance_of_transformers(logits: Tensor, _experts: Tensor) -> Tensor:
    return load_balancing_loss_func((logits,), EXPERTS, CHOSEN)


def balance_of_scores(logits: Tensor, experts: Tensor) -> Tensor:
    """Return DeepSeek-V3's balance loss (equations 17 to 20) times the number of chosen experts."""
    scores = logits.sigmoid()
    share = (scores / scores.sum(1, keepdim=True)).mean(0)
    return (EXPERTS * one_hot(experts, EXPERTS).sum(1).float().mean(0) * share).sum()


def routers_of(policy: Policy) -> list[torch.nn.Module]:
    return routing.routers_of(blocks_of(policy.model))


def results(world: World, folder: Path, **policy: Any) -> tuple[Result, Result, Result]:
    """Return the results with the formula added, without the loss, and with the loss of the setting."""
    frozen = {name: value for name, value in policy.items() if name == "train_layers"}
    plain = computed(world, folder, **frozen)
    return (
        with_the_formula(world, folder, **frozen),
        plain,
        computed(world, folder, load_balancing=COEFFICIENT, **policy),
    )


def assert_equal(actual: Result, expected: Result) -> None:
    assert_same(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    assert actual[1][METRIC] == pytest.approx(expected[1][METRIC], rel=1e-5)


def assert_adds_the_formula(with_formula: Result, plain: Result, with_loss: Result) -> None:
    assert_equal(with_loss, with_formula)
    (before, _), (actual, metrics) = plain, with_loss
    moved = [name for name in before if (actual[name] - before[name]).abs().max() > 1e-3]
    assert any(name.endswith(("gate.weight", "router.weight")) for name in moved), "routers get the gradient"
    assert 1 < metrics[METRIC] < EXPERTS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_gradient_of_the_formula_is_added_for_every_mixture(world, model_folder, architecture):
    assert_adds_the_formula(*results(world, model_folder(architecture, edits=SETTINGS[architecture])))


@pytest.mark.parametrize(
    "policy",
    [{"gradient_checkpointing": True}, {"train_layers": [1]}],
    ids=["checkpointed blocks", "one trained block"],
)
def test_the_same_gradient_is_added_with(world, model_folder, policy):
    folder = model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"])
    assert_adds_the_formula(*results(world, folder, **policy))


CUTS = {"several micro-batches": 64, "few sequences a micro-batch": 18, "one micro-batch": 1024}


def results_of_all_cuts(world: World, folder: Path, batches: dict[str, list[Group]]) -> dict[tuple[str, str], Result]:
    return {
        (batch, cut): computed(world, folder, groups, budget, load_balancing=COEFFICIENT)
        for batch, groups in batches.items()
        for cut, budget in CUTS.items()
    }


def test_the_gradient_does_not_depend_on_micro_batches_common_prefixes_or_ranks(world, model_folder):
    folder = model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"])
    batches = {"many": random_groups(6, 4), "fewer sequences than ranks": alone(random_groups(1, 1))}
    expected = {name: with_the_formula(world, folder, groups) for name, groups in batches.items()}
    for by_cut in (results_of_all_cuts(world, folder, batches), *run_on_ranks(results_of_all_cuts, 2, folder, batches)):
        for (batch, _), result in by_cut.items():
            assert_equal(result, expected[batch])


def test_truncated_completions_count_in_whichever_micro_batch_they_are(world, model_folder):
    folder = model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"])
    cut, ended = (
        [rollout_of([1, 2, first], [*range(first, first + 9)], finish_reason=reason) for first in firsts]
        for firsts, reason in (([3, 40], "length"), ([80, 120], "stop"))
    )
    groups = alone([group_of(0, cut), group_of(1, ended)])
    gradients = []
    for budget in (12, 1024):  # each sequence alone, or all in one
        config = config_of(
            folder,
            policy={"load_balancing": COEFFICIENT},
            batch={"max_tokens_per_micro_batch": budget, "mask_truncated": True},
        )
        minibatch = pack_for(world, groups, config).minibatches[0]
        gradients.append(result_of(policy_of(config, world), minibatch, world)[0])
    assert_same(*gradients, rtol=1e-5, atol=1e-6)


def test_groups_of_equal_rewards_are_not_dropped_because_their_tokens_have_a_gradient(world, model_folder):
    folder = model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"])
    equal = group_of(2, [rollout_of([1, 2], [3] * length, reward=1.0) for length in (3, 5, 7)])
    gradients = []
    for drop in (True, False):
        config = config_of(folder, policy={"load_balancing": COEFFICIENT}, batch={"drop_constant_groups": drop})
        policy = policy_of(config, world)
        clock = SimpleNamespace(time=lambda _phase: nullcontext())
        run = SimpleNamespace(config=config, world=world, clock=clock, policy=policy)
        groups = with_advantages([*random_groups(2, 3), equal], config.advantage)
        gradients.append(result_of(policy, make_batch(run, 0, groups).minibatches[0], world)[0])
    assert_same(*gradients, rtol=1e-5, atol=1e-7)


def test_the_metric_counts_each_layer_once_and_leaves_out_the_trial_step(world, model_folder):
    folder = model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"])
    plain = computed(world, folder, load_balancing=COEFFICIENT)[1][METRIC]
    config = config_of(
        folder,
        policy={"load_balancing": COEFFICIENT, "gradient_checkpointing": True},
        batch={"max_tokens_per_micro_batch": 64},
    )
    policy = policy_of(config, world)
    blocks_of(policy.model)[1].checkpointed = False  # the first is computed twice
    run_trial_step(policy, StepSettings.of(config), tokens=64)
    metrics = Metrics(world.device)
    policy.forward_backward(pack_for(world, random_groups(6, 4), config).minibatches[0], metrics)
    assert reduce(metrics, world.sum_, world.max_)[METRIC] == pytest.approx(plain, rel=1e-6)


def test_passes_without_gradients_compute_the_same_bits(world, model_folder):
    folder = model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"])
    logprobs = []
    for coefficient in (0.0, COEFFICIENT):
        config = config_of(folder, policy={"load_balancing": coefficient})
        micro_batch = pack_for(world, random_groups(2, 2), config).minibatches[0].micro_batches[0]
        logprobs.append(policy_of(config, world).score(micro_batch))
    assert torch.equal(*logprobs)


def test_experts_are_used_more_equally_the_longer_it_trains(world, model_folder):
    config = config_of(
        model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"]), policy={"load_balancing": 100.0, "lr": 3e-3}
    )
    policy, batch = policy_of(config, world), pack_for(world, random_groups(6, 4), config)
    losses = [reduce(train(policy, batch), world.sum_, world.max_)[METRIC] for _ in range(12)]
    assert losses[-1] < CHOSEN + (losses[0] - CHOSEN) / 2


def test_the_padding_of_a_rank_without_work_adds_nothing(world, model_folder):
    config = config_of(model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"]), policy={"load_balancing": COEFFICIENT})
    policy = policy_of(config, world)
    with torch.no_grad():
        whole(policy.parameters()["model.embed_tokens.weight"])[0].normal_()  # the token of padding
    counts = Counts(tokens=1, sequences=1, batch_tokens=1, minibatches=1)
    metrics = Metrics(world.device)
    policy.forward_backward(Minibatch(micro_batches=[build_micro_batch([])], counts=counts), metrics)
    assert not any(gradient.any() for gradient in gradients_of(policy).values())
    assert METRIC not in reduce(metrics, world.sum_, world.max_)


def test_blocks_without_a_router_are_refused_in_one_line_before_weights_are_read(world, model_folder, monkeypatch):
    folder = model_folder("glm4_moe", edits=SETTINGS["glm4_moe"])  # its first block is dense
    monkeypatch.setattr(masters, "UnshardedWeights", lambda *_: pytest.fail("weights are read"))
    config = config_of(folder, policy={"load_balancing": 0.5, "train_layers": [0]})
    with pytest.raises(ConfigError, match=r"^policy\.load_balancing=0\.5: no trained block has a router"):
        policy_of(config, world)


@pytest.mark.parametrize("policy", [{"load_balancing": 0.5}, {"routing_replay": True}], ids=["loss", "replay"])
def test_routers_that_return_probabilities_are_refused_in_one_line(world, model_folder, monkeypatch, policy):
    monkeypatch.setattr(routing.transformers, "__version__", "5.5.4")
    config = config_of(model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"]), policy=policy)
    with pytest.raises(ConfigError, match=r"routers of transformers 5\.5\.4 return probabilities .*; install 5\.6"):
        policy_of(config, world)


def test_off_by_default_nothing_is_added(world, model_folder):
    folder = model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"])
    assert METRIC not in computed(world, folder)[1]
    policy = policy_of(config_of(folder), world)
    assert not any(router._forward_hooks for router in routers_of(policy))
