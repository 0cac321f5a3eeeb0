"""Training with unsharded weights on one rank equals FSDP2 bit for bit, and checkpoints of each load in the other."""

from __future__ import annotations

import re
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from colocated_grpo.checkpoint.checkpoints import Checkpoints
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy.activations import StepSettings, run_trial_step
from colocated_grpo.policy.blocks import Block
from colocated_grpo.policy.masters import ShardedWeights, UnshardedWeights, adopt
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.schema import CheckpointConfig, Config
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
    with_old_logprobs,
)

FUSED = re.compile("[qkv]_proj|gate_proj|up_proj")
SHARDED = {"cpu_offload": True}
"""Settings of the policy with which one rank has FSDP2, too."""
SETTINGS = [SHARDED, {}]
MODELS = {
    "tied": ("qwen3", {}),
    "untied": ("qwen3", {"tied": False}),
    "scaled embeddings": ("gemma3", {}),
    "transposed layers": ("gpt2", {}),
}


def config_with(folder: Path, **policy: Any) -> Config:
    """Two minibatches of several micro-batches each."""
    return config_of(
        folder,
        policy={"lr": 1e-2, **policy},
        batch={"max_tokens_per_micro_batch": 36, "minibatches": 2},
        rollout={"max_prompt_tokens": 16, "max_completion_tokens": 16},
    )


def trained(world: World, config: Config, steps: int = 2) -> tuple[Policy, dict[str, float]]:
    policy = policy_of(config, world)
    batch = pack_for(world, random_groups(6, 4), config)
    assert all(len(minibatch.micro_batches) > 1 for minibatch in batch.minibatches)
    metrics = reduce(train(policy, batch.map(with_old_logprobs), steps), world.sum_, world.max_)
    return policy, metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_weights_after_several_steps_equal_those_of_fsdp(world, model_folder, model, dtype):
    architecture, shape = MODELS[model]
    folder = model_folder(architecture, **shape)
    (sharded, expected), (plain, metrics) = (
        trained(world, config_with(folder, compute_dtype=dtype, **settings)) for settings in SETTINGS
    )
    assert isinstance(sharded.weights, ShardedWeights)
    assert isinstance(plain.weights, UnshardedWeights)
    assert metrics == expected
    assert metrics["loss"] != 0
    assert_same(weights_of(plain), weights_of(sharded), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_all_micro_batches_equal_those_of_fsdp(world, model_folder, tied, dtype):
    gradients = []
    for settings in SETTINGS:
        config = config_with(model_folder(tied=tied), compute_dtype=dtype, **settings)
        policy = policy_of(config, world)
        policy.forward_backward(pack_for(world, random_groups(6, 4), config).minibatches[0], Metrics(world.device))
        gradients.append(gradients_of(policy))
    assert_same(gradients[1], gradients[0], rtol=0, atol=0)
    assert {gradient.dtype for gradient in gradients[1].values()} == {torch.float32}


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "adamw_8bit"])
def test_every_optimizer_updates_unsharded_masters_as_it_updates_shards(world, model_folder, optimizer):
    after = []
    for settings in SETTINGS:
        config = config_with(model_folder(), optimizer={"type": optimizer}, gradient_checkpointing=True, **settings)
        after.append(weights_of(trained(world, config)[0]))
    assert_same(after[1], after[0], rtol=0, atol=0)


def test_the_model_computes_with_rounded_copies_of_fp32_masters(world, model_folder):
    config = config_with(model_folder(), compute_dtype="bfloat16")
    policy = policy_of(config, world)
    batch = pack_for(world, random_groups(6, 4), config)
    for steps in range(3):
        for name, parameter in policy.model.hf_parameters().items():
            master = policy.parameters()[name]
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter, master.bfloat16()), f"{name} after {steps} steps"
        train(policy, batch)
    lost = [not torch.equal(master, master.bfloat16().float()) for master in policy.parameters().values()]
    assert all(lost)


def test_16_bit_gradients_are_freed_during_the_backward_pass(world, model_folder):
    config = config_with(model_folder(), compute_dtype="bfloat16")
    policy = policy_of(config, world)
    policy.forward_backward(pack_for(world, random_groups(6, 4), config).minibatches[0], Metrics(world.device))
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    run_trial_step(policy, StepSettings.of(config), 32)
    assert all(master.grad is None for master in policy.parameters().values())


def test_a_tied_output_layer_stays_tied(world, model_folder):
    lm = policy_of(config_with(model_folder(tied=True)), world).model.lm
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    lm = policy_of(config_with(model_folder(tied=False)), world).model.lm
    assert lm.get_output_embeddings().weight is not lm.get_input_embeddings().weight


def engine_like(policy: Policy) -> dict[str, torch.Tensor]:
    """Return views like those of an engine's memory, with arbitrary values: layers fused, then rows of padding."""
    rows: dict[str, list[str]] = {}
    parameters = policy.model.hf_parameters()
    for name in parameters:
        rows.setdefault(FUSED.sub("fused", name), []).append(name)
    views = {}
    for names in rows.values():
        sizes = [len(parameters[name]) for name in names]
        fused = torch.full((sum(sizes) + 3, *parameters[names[0]].shape[1:]), 9.0, dtype=parameters[names[0]].dtype)
        views |= dict(zip(names, fused.split([*sizes, 3]), strict=False))
    return {name: views[name] for name in parameters}


@pytest.mark.parametrize("tied", [True, False])
def test_training_in_adopted_memory_equals_training_in_own_memory(world, model_folder, tied):
    config = config_with(model_folder(tied=tied))
    expected = weights_of(trained(world, config)[0])
    policy = policy_of(config, world)
    views = engine_like(policy)
    assert adopt(policy.model, views)
    train(policy, pack_for(world, random_groups(6, 4), config).map(with_old_logprobs), steps=2)
    assert_same(weights_of(policy), expected, rtol=0, atol=0)
    assert_same(views, expected, rtol=0, atol=0)
    for name, parameter in policy.model.hf_parameters().items():
        assert parameter.data_ptr() == views[name].data_ptr()
        assert parameter.data_ptr() != policy.parameters()[name].data_ptr()


def test_compiled_blocks_compute_with_views_of_fused_layers(world, model_folder, monkeypatch):
    # aot_eager: tracing is what can fail here, and generating code would take a minute.
    monkeypatch.setattr(Block, "compile", partialmethod(Block.compile, backend="aot_eager"))
    gradients = {}
    for compiled in ("off", "on"):
        config = config_with(model_folder(), compile=compiled)
        policy = policy_of(config, world)
        assert adopt(policy.model, engine_like(policy))
        minibatch = pack_for(world, random_groups(1, 4), config).minibatches[0]
        assert len(minibatch.micro_batches) == 2, "a second size is traced again, and a third would be as well"
        policy.forward_backward(minibatch, Metrics(world.device))
        gradients[compiled] = gradients_of(policy)
    assert_same(gradients["on"], gradients["off"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [lambda view: view[1:], lambda view: view.double(), lambda view: view.to("meta")])
def test_views_of_another_shape_type_or_device_are_rejected_and_change_nothing(world, model_folder, wrong):
    policy = policy_of(config_with(model_folder()), world)
    before = {name: parameter.data_ptr() for name, parameter in policy.model.hf_parameters().items()}
    views = engine_like(policy)
    last = list(views)[-1]
    assert not adopt(policy.model, views | {last: wrong(views[last])})
    assert {name: parameter.data_ptr() for name, parameter in policy.model.hf_parameters().items()} == before


def save_and_continue(world: World, folder: Path, run_dir: Path, settings: dict, optimizer: str) -> dict:
    """Return the weights one step after the save."""
    config = config_with(folder, optimizer={"type": optimizer}, **settings)
    policy, _ = trained(world, config, steps=1)
    checkpoints = Checkpoints(run_dir, CheckpointConfig(), world)
    checkpoints.save(5, policy, {})
    checkpoints.wait()
    train(policy, pack_for(world, random_groups(2, 3), config))
    return weights_of(policy)


def restore_and_continue(world: World, folder: Path, run_dir: Path, settings: dict, optimizer: str) -> dict:
    config = config_with(folder, optimizer={"type": optimizer}, **settings)
    policy = policy_of(config, world)
    Checkpoints(run_dir, CheckpointConfig(), world).restore(policy)
    assert policy.version == 2
    train(policy, pack_for(world, random_groups(2, 3), config))
    return weights_of(policy)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "adamw_8bit"])
@pytest.mark.parametrize(("saved_by", "restored_by"), [(SHARDED, {}), ({}, SHARDED), ({}, {})])
def test_a_checkpoint_of_either_setting_continues_in_the_other(
    world, model_folder, tmp_path, saved_by, restored_by, optimizer
):
    expected = save_and_continue(world, model_folder(), tmp_path, saved_by, optimizer)
    actual = restore_and_continue(world, model_folder(), tmp_path, restored_by, optimizer)
    assert_same(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_checkpoint_of_two_ranks_continues_unsharded_on_one(world, model_folder, tmp_path, optimizer):
    expected = run_on_ranks(save_and_continue, 2, model_folder(), tmp_path, {}, optimizer)[0]
    actual = restore_and_continue(world, model_folder(), tmp_path, {}, optimizer)
    assert_same(actual, expected, rtol=1e-3, atol=1e-4)


def test_scores_follow_each_optimizer_step(world, model_folder):
    config = config_with(model_folder())
    policy = policy_of(config, world)
    batch = pack_for(world, random_groups(2, 3), config)
    micro_batch = batch.minibatches[0].micro_batches[0]
    before = policy.score(micro_batch)
    train(policy, batch)
    moved = policy.score(micro_batch)
    assert (moved - before).abs().max() > 1e-3
    assert moved.grad_fn is None
    assert torch.equal(whole(moved), policy.score(micro_batch))
