"""Load-balancing loss: the gradient of its formula is added to that of the policy, however the blocks are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from colocated_grpo.batching import Minibatch, build_micro_batch
from colocated_grpo.config.errors import ConfigError
from colocated_grpo.config.families import FAMILIES
from colocated_grpo.losses import Counts
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy import loading, routing
from colocated_grpo.policy.activations import run_trial_step
from colocated_grpo.policy.blocks import blocks_of
from colocated_grpo.policy.policy import Policy
from colocated_grpo.policy.routing import WEIGHTS, sigmoid_weights
from colocated_grpo.runtime.distributed import World
from tests.support.families import SETTINGS
from tests.support.ranks import run_on_ranks
from tests.support.small_policy import (
    assert_same,
    config_of,
    gradients_of,
    pack_for,
    policy_of,
    random_groups,
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


def computed(world: World, folder: Path, add_formula: bool = False, **policy: Any) -> Result:
    """Return the result of a minibatch of several micro-batches.

    add_formula: add the loss by `add_the_formula`.
    """
    config = config_of(folder, policy=policy, batch={"max_tokens_per_micro_batch": 64})
    trained = policy_of(config, world)
    minibatch = pack_for(world, random_groups(6, 4), config).map(with_old_logprobs).minibatches[0]
    assert len(minibatch.micro_batches) > 1
    if add_formula:
        add_the_formula(trained, len(minibatch.micro_batches) * world.size)
    metrics = Metrics(world.device)
    trained.forward_backward(minibatch, metrics)
    return gradients_of(trained), reduce(metrics, world.sum_, world.max_)


def add_the_formula(policy: Policy, parts: int) -> None:
    """Add the loss to the objective, written with plain operations on the logits of the routers that train."""
    sigmoid = WEIGHTS[policy.model.lm.config.model_type] is sigmoid_weights
    formula = balance_of_scores if sigmoid else balance_of_transformers
    seen: list[Any] = []
    for router in routers_of(policy):
        if any(parameter.requires_grad for parameter in router.parameters()):
            router.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    objective = policy._objective

    def with_formula(*arguments: Any) -> Any:
        seen.clear()
        loss, stats = objective(*arguments)
        balance = torch.stack([formula(logits, experts) for logits, _, experts in seen]).mean()
        return loss + COEFFICIENT * balance / parts, stats

    policy._objective = with_formula


def balance_of_transformers(logits: Tensor, _experts: Tensor) -> Tensor:
    return load_balancing_loss_func((logits,), EXPERTS, CHOSEN)


def balance_of_scores(logits: Tensor, experts: Tensor) -> Tensor:
    """Return DeepSeek-V3's balance loss (equations 17 to 20) times the number of chosen experts."""
    scores = logits.sigmoid()
    share = (scores / scores.sum(1, keepdim=True)).mean(0)
    return (EXPERTS * one_hot(experts, EXPERTS).sum(1).float().mean(0) * share).sum()


def routers_of(policy: Policy) -> list[torch.nn.Module]:
    return routing.routers_of(blocks_of(policy.model))


def three_results(world: World, folder: Path, **policy: Any) -> tuple[Result, Result, Result]:
    """Return the results with the formula added, without the loss, and with the loss of the setting."""
    frozen = {name: value for name, value in policy.items() if name == "train_layers"}
    with_formula = computed(world, folder, add_formula=True, **frozen)
    plain = computed(world, folder, **frozen)
    return with_formula, plain, computed(world, folder, load_balancing=COEFFICIENT, **policy)


def assert_adds_the_formula(with_formula: Result, plain: Result, with_loss: Result) -> None:
    (expected, _), (before, _), (actual, metrics) = with_formula, plain, with_loss
    assert_same(actual, expected, rtol=1e-5, atol=1e-5)
    moved = [name for name in before if (actual[name] - before[name]).abs().max() > 1e-3]
    assert any(name.endswith(("gate.weight", "router.weight")) for name in moved), "routers get the gradient"
    assert 1 < metrics[METRIC] < EXPERTS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_gradient_of_the_formula_is_added_for_every_mixture(world, model_folder, architecture):
    assert_adds_the_formula(*three_results(world, model_folder(architecture, edits=SETTINGS[architecture])))


@pytest.mark.parametrize(
    "policy",
    [{"gradient_checkpointing": True}, {"train_layers": [1]}],
    ids=["checkpointed blocks", "one trained block"],
)
def test_the_same_gradient_is_added_with(world, model_folder, policy):
    folder = model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"])
    assert_adds_the_formula(*three_results(world, folder, **policy))


def test_two_ranks_add_the_gradient_of_the_mean_over_both(model_folder):
    by_rank = run_on_ranks(three_results, 2, model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"]))
    assert len(by_rank) == 2
    for results in by_rank:
        assert_adds_the_formula(*results)


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
    run_trial_step(policy, config, tokens=64)
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
    monkeypatch.setattr(loading, "UnshardedWeights", lambda *_: pytest.fail("weights are read"))
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
