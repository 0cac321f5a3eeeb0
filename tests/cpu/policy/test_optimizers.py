"""Optimizers over shards equal the original ones over full tensors; invalid updates are rejected before they happen."""

from __future__ import annotations

import math

import bitsandbytes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.optimization import Adafactor as TransformersAdafactor

from colocated_grpo.errors import RunError
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy.optimizers import LocalShardOptimizer, learning_rate
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.training import PolicyConfig
from tests.support.ranks import run_on_ranks
from tests.support.small_policy import (
    assert_same,
    config_of,
    gradients_of,
    pack_for,
    policy_of,
    random_groups,
    train,
    weights_of,
    whole,
)

LR, DECAY, STEPS = 1e-2, 0.1, 4
NO_CLIP = 0.0
ORIGINALS = {
    "adamw": lambda parameters: torch.optim.AdamW(
        parameters, lr=LR, betas=(0.8, 0.95), eps=1e-4, weight_decay=DECAY, foreach=False, fused=False
    ),
    "adafactor": lambda parameters: TransformersAdafactor(
        parameters, lr=LR, scale_parameter=False, relative_step=False, weight_decay=DECAY
    ),
    "adamw_8bit": lambda parameters: bitsandbytes.optim.AdamW8bit(
        parameters, lr=LR, betas=(0.8, 0.95), eps=1e-4, weight_decay=DECAY
    ),
}


def optimizer_config(folder, kind: str, **policy):
    settings = {"type": kind, "beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "weight_decay": DECAY}
    return config_of(folder, policy={"lr": LR, "grad_clip": NO_CLIP, "optimizer": settings, **policy})


def synthetic_gradient(name: str, step: int, shape) -> torch.Tensor:
    """Magnitudes differ between steps and rows, so that every moment matters."""
    generator = torch.Generator().manual_seed(hash((len(name), step)) & 0xFFFF)
    gradient = torch.randn(*shape, generator=generator)
    return gradient * torch.logspace(-3, 0, shape[0]).reshape(-1, *[1] * (len(shape) - 1)) * (1 + step)


def step_with_synthetic_gradients(world: World, folder, kind: str) -> dict:
    """Return the weights after STEPS optimizer steps over shards. One rank has shards with `cpu_offload` only."""
    policy = policy_of(optimizer_config(folder, kind, cpu_offload=world.size == 1), world)
    # FSDP reallocates some shards in the first forward pass: an optimizer with references to old storage would miss it.
    policy.score(pack_for(world, random_groups(1, 2), config_of(folder)).minibatches[0].micro_batches[0])
    for step in range(STEPS):
        for name, parameter in policy.parameters().items():
            parameter.grad = shard_like(parameter, synthetic_gradient(name, step, parameter.shape))
        policy.optimizer_step(Metrics(world.device))
    return weights_of(policy)


def shard_like(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    return torch.distributed.tensor.distribute_tensor(full, parameter.device_mesh, parameter.placements)


def step_the_original(folder, kind: str) -> dict:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = ORIGINALS[kind](model.parameters())
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            parameter.grad = synthetic_gradient(name, step, parameter.shape)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ORIGINALS)
def test_an_optimizer_over_the_shards_of_one_rank_equals_the_original(world, model_folder, kind):
    folder = model_folder()
    expected = step_the_original(folder, kind)
    actual = step_with_synthetic_gradients(world, folder, kind)
    assert_same(actual, {name: expected[name] for name in actual}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_two_ranks_update_as_one_rank_does(world, model_folder, kind):
    folder = model_folder()
    expected = step_with_synthetic_gradients(world, folder, kind)
    for actual in run_on_ranks(step_with_synthetic_gradients, 2, folder, kind):
        assert_same(actual, expected, rtol=1e-5, atol=1e-6)


def test_adamw_8bit_on_two_ranks_trains_every_row_nearly_as_one_rank_does(world, model_folder):
    """Quantisation blocks have other boundaries on a shard, so the result is close to one rank's but not equal."""
    folder = model_folder()
    start = weights_of(policy_of(config_of(folder), world))
    expected = step_with_synthetic_gradients(world, folder, "adamw_8bit")
    for actual in run_on_ranks(step_with_synthetic_gradients, 2, folder, "adamw_8bit"):
        for name, tensor in actual.items():
            rows_changed = (tensor != start[name]).reshape(len(tensor), -1).any(dim=1)
            assert rows_changed.all(), name
            assert (tensor - expected[name]).abs().mean() < 0.2 * LR * STEPS, name


def test_bitsandbytes_gets_no_parameter_of_which_a_rank_has_no_rows():
    """As of the gate of a shared expert, [1, hidden], on several ranks: its CUDA kernel would end the process."""
    parameters = [nn.Parameter(torch.ones(rows, 64)) for rows in (0, 2)]
    optimizer = LocalShardOptimizer(parameters, build=bitsandbytes.optim.AdamW8bit, lr=LR)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [len(shard) for shard in optimizer.state] == [2]
    assert (parameters[1] != 1).all()


@pytest.mark.parametrize("kind", ORIGINALS)
def test_allocating_optimizer_state_early_changes_neither_weights_nor_later_steps(world, model_folder, kind):
    folder = model_folder()
    config = optimizer_config(folder, kind)
    early, late = policy_of(config, world), policy_of(config, world)
    before = weights_of(early)
    early.update.init_state()
    assert_same(weights_of(early), before, rtol=0, atol=0)
    assert early.version == 0
    assert all(early.optimizer_states().values())
    batch = pack_for(world, random_groups(2, 3), config)
    for policy in (early, late):
        train(policy, batch, steps=2)
    assert_same(weights_of(early), weights_of(late), rtol=0, atol=0)
    assert not torch.equal(weights_of(early)["model.norm.weight"], before["model.norm.weight"])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_raises_and_leaves_weights_and_moments_unchanged(world, model_folder, bad):
    config = optimizer_config(model_folder(), "adamw")
    policy = policy_of(config, world)
    batch = pack_for(world, random_groups(2, 3), config)
    train(policy, batch)
    weights, moments = weights_of(policy), moments_of(policy)
    policy.forward_backward(batch.minibatches[0], Metrics(world.device))
    policy.parameters()["model.norm.weight"].grad[3] = bad
    with pytest.raises(RunError, match=r"optimizer step 1: the gradient norm is (nan|inf)"):
        policy.optimizer_step(Metrics(world.device))
    assert_same(weights_of(policy), weights, rtol=0, atol=0)
    assert_same(moments_of(policy), moments, rtol=0, atol=0)
    assert policy.version == 1


def moments_of(policy) -> dict:
    states = policy.optimizer_states()
    return {f"{name}.{key}": whole(value) for name, state in states.items() for key, value in state.items()}


def clipped_steps(world: World, folder, scale: float) -> tuple:
    """Clip at scale * norm; return (reported gradient norm, true norm, distance that SGD moved the weights)."""
    groups = random_groups(2, 3)
    policy = policy_of(config_of(folder), world)
    policy.forward_backward(pack_for(world, groups, config_of(folder)).minibatches[0], Metrics(world.device))
    norm = torch.stack([g.square().sum() for g in gradients_of(policy).values()]).sum().sqrt().item()
    config = config_of(folder, policy={"lr": 1.0, "grad_clip": scale * norm})
    policy = policy_of(config, world)
    policy.update.optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.0)
    before = weights_of(policy)
    metrics = Metrics(world.device)
    batch = pack_for(world, groups, config)
    policy.forward_backward(batch.minibatches[0], metrics)
    policy.optimizer_step(metrics)
    moved = torch.stack([(weights_of(policy)[n] - before[n]).square().sum() for n in before]).sum().sqrt().item()
    return reduce(metrics, world.sum_, world.max_)["grad_norm"], norm, moved


def clipped_at_each(world: World, folder, scales: list[float]) -> list[tuple]:
    return [clipped_steps(world, folder, scale) for scale in scales]


def test_clipping_uses_the_norm_over_all_ranks_and_never_scales_up(model_folder):
    scales = [0.25, 4.0, 0.0]  # 0: no limit
    for results in run_on_ranks(clipped_at_each, 2, model_folder(), scales):
        for scale, (reported, norm, moved) in zip(scales, results, strict=True):
            assert reported == pytest.approx(norm, rel=1e-5)
            assert moved == pytest.approx(min(1.0, scale or 1.0) * norm, rel=1e-4)


def test_gradients_are_freed_after_a_step(world, model_folder):
    config = config_of(model_folder())
    policy = policy_of(config, world)
    train(policy, pack_for(world, random_groups(1, 2), config))
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_learning_rate_schedules_follow_their_formulas():
    def rates(**settings):
        config = PolicyConfig(lr=1.0, min_lr=0.2, warmup_steps=2, **settings)
        return [learning_rate(config, step, 6) for step in range(8)]

    assert rates(schedule="constant") == [0.5, 1.0] + [1.0] * 6
    assert rates(schedule="linear") == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = [0.2 + 0.8 * (1 + math.cos(math.pi * part / 4)) / 2 for part in range(5)]
    assert rates(schedule="cosine") == pytest.approx([0.5, 1.0, *cosine, 0.2])


def test_a_warmup_below_1_is_a_fraction_of_the_steps():
    ratio, steps = (PolicyConfig(lr=1.0, warmup_steps=warmup, schedule="linear") for warmup in (0.3, 4))
    assert [learning_rate(ratio, step, 11) for step in range(12)] == [learning_rate(steps, s, 11) for s in range(12)]


@given(st.integers(0, 20), st.integers(1, 30), st.sampled_from(["constant", "cosine", "linear"]), st.floats(0, 1e-3))
def test_a_learning_rate_stays_between_zero_and_its_peak(warmup_steps, total_steps, schedule, min_lr):
    config = PolicyConfig(lr=1e-3, min_lr=min_lr, warmup_steps=warmup_steps, schedule=schedule)
    rates = [learning_rate(config, step, total_steps) for step in range(total_steps + 2)]
    assert all(0 < rate <= 1e-3 or rate == min_lr for rate in rates)
    after_warmup = rates[warmup_steps:]
    assert after_warmup == sorted(after_warmup, reverse=True)


def test_each_optimizer_step_uses_the_learning_rate_of_its_version(world, model_folder):
    config = config_of(model_folder(), training_steps=2, batch={"epochs": 2}, policy={"lr": 1e-3, "schedule": "linear"})
    policy = policy_of(config, world)
    batch = pack_for(world, random_groups(1, 2), config)
    rates = [reduce(train(policy, batch), world.sum_, world.max_)["lr"] for _ in range(4)]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_on_a_cpu_the_optimizers_state_stays_where_it_is(world, model_folder):
    assert policy_of(config_of(model_folder(), policy={"offload_optimizer": True}), world).offload is None
