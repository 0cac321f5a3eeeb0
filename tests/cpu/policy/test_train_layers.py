"""Training some blocks: their gradients equal those of full training, and all other weights are frozen and small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from colocated_grpo.checkpoint.checkpoints import Checkpoints
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.masters import ShardedWeights, UnshardedWeights
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

FORMS = {
    "FSDP2 on one rank": (1, ShardedWeights, {"policy": {"cpu_offload": True}}),
    "FSDP2 on two ranks": (2, ShardedWeights, {}),
    "unsharded": (1, UnshardedWeights, {}),
    "unsharded, shared": (1, UnshardedWeights, {"weights": "shared"}),
}
"""Ranks, class and settings of each way to hold the weights. Without cpu_offload one rank needs no FSDP2."""
TRAINED = "model.layers.1."


def blocks_config(folder: Path, layers: str | None = "1", **changes: Any) -> Config:
    """Two minibatches of several micro-batches each."""
    return config_of(
        folder,
        batch={"max_tokens_per_micro_batch": 36, "minibatches": 2},
        rollout={"max_prompt_tokens": 16, "max_completion_tokens": 16},
        **{**changes, "policy": {"lr": 1e-2, "train_layers": layers, **changes.get("policy", {})}},
    )


def frozen(policy: Policy) -> dict[str, Tensor]:
    """Return the model's parameters that are not trained."""
    return {name: p for name, p in policy.model.hf_parameters().items() if not name.startswith(TRAINED)}


def first_gradients(world: World, config: Config) -> tuple[dict[str, Tensor], str]:
    """Return the gradients of one minibatch, and the class of the weights."""
    policy = policy_of(config, world)
    minibatch = pack_for(world, random_groups(6, 4), config).minibatches[0]
    assert len(minibatch.micro_batches) > 1
    policy.forward_backward(minibatch, Metrics(world.device))
    if config.policy.train_layers is not None:
        assert frozen(policy)
        assert all(parameter.grad is None and not parameter.requires_grad for parameter in frozen(policy).values())
    return gradients_of(policy), type(policy.weights).__name__


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_the_trained_block_equal_those_of_full_training(world, model_folder, form, tied):
    ranks, kind, changes = FORMS[form]
    folder = model_folder(tied=tied)
    everything, _ = first_gradients(world, blocks_config(folder, None))
    expected = {name: gradient for name, gradient in everything.items() if name.startswith(TRAINED)}
    assert len(expected) > 5
    assert min(gradient.abs().max() for gradient in expected.values()) > 1e-3
    config = blocks_config(folder, **changes)
    results = run_on_ranks(first_gradients, ranks, config)
    for gradients, name in results:
        assert name == kind.__name__
        assert_same(gradients, expected, rtol=1e-5, atol=1e-6)


def weights_around_training(world: World, config: Config) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return all weights of the model before and after three steps."""
    policy = policy_of(config, world)
    before = {name: whole(weight) for name, weight in policy.weights.published().items()}
    train(policy, pack_for(world, random_groups(6, 4), config).map(with_old_logprobs), steps=3)
    return before, {name: whole(weight) for name, weight in policy.weights.published().items()}


@pytest.mark.parametrize("form", FORMS)
def test_only_the_trained_block_changes(model_folder, form):
    ranks, _, changes = FORMS[form]
    for before, after in run_on_ranks(weights_around_training, ranks, blocks_config(model_folder(), **changes)):
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {name for name in before if name.startswith(TRAINED)}


def stored_types(world: World, config: Config) -> dict[str, set[torch.dtype]]:
    """Return the types in which trained and frozen weights are stored between steps, and their shards' bytes."""
    policy = policy_of(config, world)
    train(policy, pack_for(world, random_groups(6, 4), config))
    policy.weights.release()
    local = [p.to_local() if isinstance(p, DTensor) else p for p in frozen(policy).values()]
    return {
        "trained": {master.dtype for master in policy.parameters().values()},
        "frozen": {weight.dtype for weight in local},
        "names": {name.startswith(TRAINED) for name in policy.parameters()},
        "optimizer": {name.startswith(TRAINED) for name in policy.optimizer_states()},
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_frozen_weights_are_stored_in_the_compute_type_and_have_no_masters(model_folder, form, dtype):
    ranks, _, changes = FORMS[form]
    policy = {**changes.get("policy", {}), "compute_dtype": dtype}
    config = blocks_config(model_folder(), **{**changes, "policy": policy})
    for stored in run_on_ranks(stored_types, ranks, config):
        assert stored["frozen"] == {getattr(torch, dtype)}
        assert stored["trained"] == {torch.float32}
        assert stored["names"] == stored["optimizer"] == {True}


def saved_activations(world: World, config: Config) -> int:
    """Return the number of values that a forward pass saves for the backward pass, weights left out."""
    policy = policy_of(config, world)
    (micro_batch,) = (
        pack_for(world, random_groups(3, 3), config_of(Path(config.model.name))).minibatches[0].micro_batches
    )
    kept: dict[int, int] = {}
    weights = {parameter.data_ptr() for parameter in policy.model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = policy.model(micro_batch.tokens)  # alive until all is counted, so no address is used twice
    del outputs
    return sum(kept.values())


def test_blocks_before_the_first_trained_one_save_no_activations(world, model_folder):
    saved = {layers: saved_activations(world, blocks_config(model_folder(), layers)) for layers in ("0", "1", "0-1")}
    assert saved["0-1"] - saved["1"] > 0.3 * saved["0-1"]
    assert saved["0"] > saved["1"], "the gradient of block 0 passes through block 1"


def save_after_training(world: World, config: Config, run_dir: Path) -> dict[str, Tensor]:
    policy = policy_of(config, world)
    train(policy, pack_for(world, random_groups(6, 4), config))
    checkpoints = Checkpoints(run_dir, CheckpointConfig(), world)
    checkpoints.save(1, policy, {})
    checkpoints.wait()
    return continued(world, policy, config)


def restore_and_continue(world: World, config: Config, run_dir: Path) -> dict[str, Tensor]:
    policy = policy_of(config, world)
    assert Checkpoints(run_dir, CheckpointConfig(), world).restore(policy)[0] == 1
    return continued(world, policy, config)


def continued(world: World, policy: Policy, config: Config) -> dict[str, Tensor]:
    train(policy, pack_for(world, random_groups(2, 3), config))
    return weights_of(policy)


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_has_the_trained_block_alone_and_continues_bit_for_bit(model_folder, tmp_path, form):
    ranks, _, changes = FORMS[form]
    config = blocks_config(model_folder(), **changes)
    expected = run_on_ranks(save_after_training, ranks, config, tmp_path)
    saved = dcp.FileSystemReader(tmp_path / "checkpoints/step_000001").read_metadata().state_dict_metadata
    assert {name for name in saved if name.startswith("model.")} == {f"model.{name}" for name in expected[0]}
    assert all(TRAINED in name for name in saved)
    for mine, other in zip(run_on_ranks(restore_and_continue, ranks, config, tmp_path), expected, strict=True):
        assert_same(mine, other, rtol=0, atol=0)
