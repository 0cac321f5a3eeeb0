"""A base in 4 bits: the values of NF4, and a policy that computes as one whose checkpoint holds the rounded weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.lora import nf4
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config
from tests.support.compiled_blocks import graph_counter
from tests.support.interpreter import interpreted
from tests.support.random_models import make_model
from tests.support.ranks import run_on_ranks
from tests.support.small_policy import (
    INIT_STD,
    SHAPE,
    assert_same,
    config_of,
    gradients_of,
    merged_weights,
    move,
    pack_for,
    policy_of,
    random_groups,
    state_of_trained_adapter,
    weights_of,
)

WIDE = replace(SHAPE, hidden=64, head_dim=32, intermediate=192)
"""Widths that are multiples of a block."""


def brute_force(weight: Tensor) -> Tensor:
    """Round each block of 64 elements of a row, one element at a time, to the nearest level times the largest |w|."""
    rounded = torch.empty_like(weight)
    for row, values in enumerate(weight.tolist()):
        for start in range(0, len(values), 64):
            block = values[start : start + 64]
            scale = max(abs(value) for value in block)
            nearest = [min(nf4.LEVELS, key=lambda level: abs(level * scale - value)) for value in block]
            rounded[row, start : start + 64] = torch.tensor(nearest) * scale
    return rounded


def test_the_values_are_those_of_a_brute_force_reference_and_of_bitsandbytes():
    weight = torch.randn(24, 192, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[3, :64] = 0
    for dtype in (torch.float32, torch.bfloat16):
        packed = nf4.pack(weight)
        assert packed.dtype == torch.float32, "FSDP2 of torch 2.11 rejects integers, and changes 16-bit types on GPUs"
        assert packed.nbytes * 16 == 9 * weight.numel()
        values = nf4.unpack(packed, dtype)
        assert nf4.unpack(nf4.pack(weight[:0]), dtype).shape == (0, 192), "a rank may have no rows"
        assert torch.equal(values, brute_force(weight).to(dtype))
        theirs = bnb.dequantize_4bit(*bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4"))
        assert torch.equal(values, theirs.to(dtype))


KERNEL = """
import torch
from colocated_grpo.policy.lora import nf4
from colocated_grpo.policy.lora.merge_kernel import unpack
for rows, columns in ((5, 64), (3, 2112), (0, 64)):
    packed = nf4.pack(torch.randn(rows + 1, columns))[1:]
    unpacked = torch.empty(rows, columns)  # bfloat16 is cut in the interpreter, and rounded on a GPU
    unpack(unpacked, packed, nf4.levels(packed.device), nf4.BLOCK)
    assert torch.equal(unpacked, nf4.unpack(packed, torch.float32))
"""


def test_the_kernel_unpacks_to_the_same_values():
    assert not interpreted("-c", KERNEL)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """Return a function of the architecture: folders of a model, and of the model with rounded linear layers."""

    @cache
    def made(architecture: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(architecture)
        make_model(folder / "model", architecture=architecture, shape=WIDE, init_std=INIT_STD)
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        head = model.get_output_embeddings()
        for module in model.modules():
            if type(module).__name__ in ("Linear", "Conv1D") and module is not head:
                module.weight.data = brute_force(module.weight.data)
        make_model(folder / "rounded", architecture=architecture, shape=WIDE)
        model.save_pretrained(folder / "rounded")
        return folder / "model", folder / "rounded"

    return made


def four_bits(folder: Path, *, dtype: str = "float32", base_dtype: str = "nf4", **lora: Any) -> Config:
    lora = {"rank": 4, "alpha": 8, "base_dtype": base_dtype, **lora}
    return config_of(
        folder,
        policy={"lr": 1e-2, "compute_dtype": dtype, "lora": lora, "compile": False},
        batch={"max_tokens_per_micro_batch": 36, "minibatches": 2},
        rollout={"max_prompt_tokens": 16, "max_completion_tokens": 16},
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [{}, {"exclude_modules": ["v_proj", "c_proj"], "layers": "1"}], ids=["all", "some"])
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_training_equals_that_of_the_rounded_weights_in_16_bits(world, folders, architecture, lora, dtype):
    model, rounded = folders(architecture)
    actual = state_of_trained_adapter(world, four_bits(model, dtype=dtype, **lora))
    expected = state_of_trained_adapter(world, four_bits(rounded, dtype=dtype, base_dtype="auto", **lora))
    for mine, other in zip(actual, expected, strict=True):
        assert list(mine) == list(other)
        assert_same(mine, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_train_as_one(world, folders, dtype):
    config = four_bits(folders("qwen3")[0], dtype=dtype)
    one = state_of_trained_adapter(world, config)
    first, second = run_on_ranks(state_of_trained_adapter, 2, config)
    loose = dtype == "bfloat16"
    assert_same(first[0], one[0], rtol=0.05 if loose else 1e-4, atol=3e-2 if loose else 1e-5)
    if not loose:
        assert_same(first[1], one[1], rtol=1e-3, atol=1e-4)
        assert_same(first[2], one[2], rtol=1e-3, atol=1e-4)
    for mine, other in zip(first, second, strict=True):
        assert_same(mine, other, rtol=0, atol=0)


def test_the_reference_is_the_initial_adapter_and_scoring_leaves_no_trace(world, folders):
    config = four_bits(folders("qwen3")[0])
    policy = policy_of(config, world)
    (micro_batch,) = pack_for(world, random_groups(3, 3), config_of(folders("qwen3")[0])).minibatches[0].micro_batches
    factors, initial = policy.weights.nonzero_factors(), policy.score(micro_batch)
    move(policy)
    moved, after = policy.score(micro_batch), weights_of(policy)
    assert not torch.equal(moved, initial)
    with policy.weights.with_factors(factors):
        assert torch.equal(policy.score(micro_batch), initial)
    assert torch.equal(policy.score(micro_batch), moved)
    assert_same(weights_of(policy), after, rtol=0, atol=0)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_all_blocks_share_one_graph_that_keeps_no_merged_weights(world, folders, monkeypatch, checkpointed):
    config = four_bits(folders("qwen3")[0])
    policy = config.policy
    gradients = {}
    for compiled in (False, True):
        count = graph_counter(monkeypatch)
        changes = {"compile": compiled, "gradient_checkpointing": checkpointed}
        built = policy_of(config.model_copy(update={"policy": policy.model_copy(update=changes)}), world)
        move(built)
        sizes: list[torch.Size] = []
        minibatch = pack_for(world, random_groups(1, 3), config).minibatches[0]
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.shape) or t, lambda t: t):
            built.forward_backward(minibatch, Metrics(world.device))
        assert count() == int(compiled)
        gradients[compiled] = gradients_of(built)
        merged = {torch.Size((64, 64)), torch.Size((64, 192)), torch.Size((192, 64))}
        assert merged < {weight.shape for weight in merged_weights(built).values()}
        assert not merged & set(sizes)
    assert_same(gradients[True], gradients[False], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "edits", "line"),
    [
        ("qwen3", {"hidden": 96}, "model.layers.0.self_attn.q_proj has rows whose length is no multiple of 64"),
        ("qwen3_moe", {}, "model.layers.0.mlp.experts.gate_up_proj is a fused expert, which stays in 16 bits"),
    ],
)
def test_a_model_that_does_not_fit_is_rejected_in_one_line(world, tmp_path, architecture, edits, line):
    shape = replace(WIDE, architecture=architecture, **edits)
    folder = make_model(tmp_path / "model", shape=shape)
    with pytest.raises(ConfigError) as caught:
        policy_of(four_bits(folder), world)
    assert str(caught.value) == f"policy.lora.base_dtype=nf4: must be auto for this model: {line}"
