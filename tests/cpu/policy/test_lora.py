"""Adapters: forward and gradients equal PEFT's, any number of ranks computes the same, and the base never changes."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from colocated_grpo.batching.micro_batch import MicroBatch
from colocated_grpo.checkpoint.checkpoints import Checkpoints
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.blocks import Block
from colocated_grpo.policy.lora import weights
from colocated_grpo.policy.lora.weights import AdapterWeights, adapted_layers, frozen_experts, insert_adapters
from colocated_grpo.policy.model import build_empty
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import CheckpointConfig, Config
from colocated_grpo.settings.training import LoRAConfig
from tests.support.families import GEMMA4_LARGE, SETTINGS
from tests.support.ranks import run_on_ranks
from tests.support.small_policy import (
    assert_same,
    config_of,
    gradients_of,
    logprobs_one_by_one,
    merged_weights,
    move,
    pack_for,
    policy_of,
    random_groups,
    rounding,
    state_of_trained_adapter,
    train,
    weights_of,
    with_old_logprobs,
)

FAMILIES = SETTINGS | {"gemma4": GEMMA4_LARGE}
SHARED = ("llama", "qwen2", "qwen3", "gemma", "mistral", "gemma3", "gpt2")
"""Families that are also trained with one copy of the weights for policy and engine."""


ATTENTION_ONLY = {"exclude_modules": ["gate_proj", "up_proj", "down_proj"]}
LAYERS = dict.fromkeys(("deepseek_v3", "glm4_moe", "qwen3_5_moe", "qwen3_next"), ATTENTION_ONLY)
"""PEFT takes the shared layers of these families for their experts."""


def lora_config(folder: Path, *, dtype: str = "float32", weights: str = "copied", **lora: Any) -> Config:
    """Two minibatches of several micro-batches each."""
    return config_of(
        folder,
        weights=weights,
        policy={"lr": 1e-2, "compute_dtype": dtype, "lora": {"rank": 4, "alpha": 8, **lora}},
        batch={"max_tokens_per_micro_batch": 36, "minibatches": 2},
        rollout={"max_prompt_tokens": 16, "max_completion_tokens": 16},
    )


def upstream_of(micro_batch: MicroBatch) -> Tensor:
    return torch.randn(len(micro_batch.tokens.targets_N), generator=torch.Generator().manual_seed(3))


def ours(policy: Policy, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs, _ = policy.model(micro_batch.tokens)
    (logprobs * upstream_of(micro_batch)).sum().backward()
    policy.weights.reduce_gradients()
    policy.weights.release()
    return logprobs.detach(), gradients_of(policy)


def pefts(folder: Path, policy: Policy, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the same with PEFT's own module around transformers' model, one sequence at a time."""
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    # With experts, PEFT's "all-linear" means experts and routers too.
    targets = list(adapted_layers(policy.model)) if frozen_experts(policy.model) else "all-linear"
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets)).eval()
    factors = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    assert factors.keys() == policy.parameters().keys()
    for name, value in policy.parameters().items():
        factors[name].data.copy_(value)
    logprobs = logprobs_one_by_one(model, micro_batch)
    (logprobs * upstream_of(micro_batch)).sum().backward()
    return logprobs.detach(), {name: factors[name].grad for name in policy.parameters()}


@pytest.mark.parametrize(
    ("family", "weights"), [*((family, "copied") for family in FAMILIES), *((family, "shared") for family in SHARED)]
)
def test_log_probabilities_and_gradients_equal_pefts(world, model_folder, family, weights):
    folder = model_folder(family, edits=FAMILIES[family])
    config = lora_config(folder, weights=weights, **LAYERS.get(family, {}))
    policy = policy_of(config, world)
    move(policy)
    (micro_batch,) = pack_for(world, random_groups(3, 3), config_of(folder)).minibatches[0].micro_batches
    actual, gradients = ours(policy, micro_batch)
    expected, expected_gradients = pefts(folder, policy, micro_batch)
    assert expected.std() > 0.1, "tokens must differ in probability"
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert_same(gradients, expected_gradients, rtol=1e-4, atol=max(1e-5, rounding(expected_gradients)))


def trained(world: World, config: Config, steps: int = 2) -> Policy:
    policy = policy_of(config, world)
    batch = pack_for(world, random_groups(6, 4), config).map(with_old_logprobs)
    train(policy, batch, steps)
    return policy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_train_as_one(world, model_folder, dtype):
    config = lora_config(model_folder(tied=False), dtype=dtype)
    gradients, factors, merged = state_of_trained_adapter(world, config)
    first, second = run_on_ranks(state_of_trained_adapter, 2, config)
    loose = dtype == "bfloat16"
    assert_same(first[0], gradients, rtol=0.05 if loose else 1e-4, atol=3e-2 if loose else 1e-5)
    if not loose:
        assert_same(first[1], factors, rtol=1e-3, atol=1e-4)
        assert_same(first[2], merged, rtol=1e-3, atol=1e-4)
    for mine, other in zip(first, second, strict=True):
        assert_same(mine, other, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "adamw_8bit"])
def test_every_optimizer_trains_on_two_ranks_as_on_one(world, model_folder, optimizer):
    one = factors_trained_with(world, model_folder(), optimizer)
    first, second = run_on_ranks(factors_trained_with, 2, model_folder(), optimizer)
    assert_same(first, second, rtol=0, atol=0)
    assert_same(first, one, rtol=2e-2, atol=2e-3)


def factors_trained_with(world: World, folder: Path, optimizer: str) -> dict[str, Tensor]:
    return weights_of(trained(world, with_optimizer(lora_config(folder), optimizer), steps=3))


@pytest.mark.parametrize("weights", ["copied", "shared"])
def test_the_base_does_not_change_and_only_targets_are_merged(world, model_folder, weights):
    folder = model_folder()
    config = lora_config(folder, dtype="bfloat16", weights=weights, target_modules=["q_proj", "down_proj"], layers="1")
    before = merged_weights(policy_of(config, world))
    policy = trained(world, config)
    assert isinstance(policy.weights, AdapterWeights)
    changed = {name for name, weight in merged_weights(policy).items() if not torch.equal(weight, before[name])}
    assert changed == {"model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"}
    with policy.weights.with_factors({}):
        assert_same(merged_weights(policy), before, rtol=0, atol=0)
    checkpoint = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(weight, checkpoint[name]) for name, weight in before.items())


def test_a_new_adapter_computes_exactly_as_its_base(world, model_folder):
    folder = model_folder()
    (micro_batch,) = pack_for(world, random_groups(3, 3), config_of(folder)).minibatches[0].micro_batches
    for dtype in ("float32", "bfloat16"):
        adapted = policy_of(lora_config(folder, dtype=dtype), world).score(micro_batch)
        base = policy_of(config_of(folder, policy={"compute_dtype": dtype}), world).score(micro_batch)
        assert torch.equal(adapted, base)


@pytest.mark.parametrize("weights", ["copied", "shared"])
def test_the_reference_is_the_initial_adapter_and_scoring_leaves_no_trace(world, model_folder, weights):
    policy = policy_of(lora_config(model_folder(), dtype="bfloat16", weights=weights), world)
    (micro_batch,) = pack_for(world, random_groups(3, 3), config_of(model_folder())).minibatches[0].micro_batches
    move(policy, seed=1)
    initial, start = policy.score(micro_batch), merged_weights(policy)
    assert isinstance(policy.weights, AdapterWeights)
    factors = policy.weights.nonzero_factors()
    move(policy, seed=2)
    moved, after = policy.score(micro_batch), merged_weights(policy)
    assert not torch.equal(moved, initial)
    with policy.weights.with_factors(factors) as weights_of_reference:
        assert weights_of_reference is policy.weights
        assert torch.equal(policy.score(micro_batch), initial)
        assert_same(merged_weights(policy), start, rtol=0, atol=0)
    assert torch.equal(policy.score(micro_batch), moved)
    assert_same(merged_weights(policy), after, rtol=0, atol=0)


def save_and_continue(world: World, folder: Path, run_dir: Path, optimizer: str) -> tuple[dict, dict]:
    policy = trained(world, with_optimizer(lora_config(folder, dtype="bfloat16"), optimizer), steps=1)
    checkpoints = Checkpoints(run_dir, CheckpointConfig(), world)
    checkpoints.save(5, policy, {})
    checkpoints.wait()
    return continued(world, policy, folder)


def restore_and_continue(world: World, folder: Path, run_dir: Path, optimizer: str) -> tuple[dict, dict]:
    policy = policy_of(with_optimizer(lora_config(folder, dtype="bfloat16"), optimizer), world)
    assert Checkpoints(run_dir, CheckpointConfig(), world).restore(policy)[0] == 5
    return continued(world, policy, folder)


def continued(world: World, policy: Policy, folder: Path) -> tuple[dict, dict]:
    train(policy, pack_for(world, random_groups(2, 3), config_of(folder)))
    return weights_of(policy), merged_weights(policy)


def with_optimizer(config: Config, optimizer: str) -> Config:
    return with_policy(config, optimizer=config.policy.optimizer.model_copy(update={"type": optimizer}))


def with_policy(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"policy": config.policy.model_copy(update=changes)})


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "adamw_8bit"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restored_run_continues_bit_for_bit(model_folder, tmp_path, ranks, optimizer):
    expected = run_on_ranks(save_and_continue, ranks, model_folder(), tmp_path, optimizer)
    actual = run_on_ranks(restore_and_continue, ranks, model_folder(), tmp_path, optimizer)
    for mine, other in zip(actual, expected, strict=True):
        for part, same in zip(mine, other, strict=True):
            assert_same(part, same, rtol=0, atol=0)


def test_a_checkpoint_has_the_adapter_alone(world, model_folder, tmp_path):
    policy = trained(world, lora_config(model_folder()), steps=1)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), world)
    checkpoints.save(1, policy, {})
    checkpoints.wait()
    saved = dcp.FileSystemReader(tmp_path / "checkpoints" / "step_000001").read_metadata().state_dict_metadata
    assert {name for name in saved if name.startswith("model.")} == {f"model.{name}" for name in policy.parameters()}


def test_the_first_blocks_without_adapters_keep_no_activations(world, model_folder):
    (micro_batch,) = pack_for(world, random_groups(3, 3), config_of(model_folder())).minibatches[0].micro_batches
    saved = {}
    for layers in ("0-1", "1"):
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            policy_of(lora_config(model_folder(), layers=layers), world).model(micro_batch.tokens)
        saved[layers] = sum(kept)
    assert saved["1"] < 0.75 * saved["0-1"]


@pytest.mark.parametrize(
    ("lora", "line"),
    [
        (
            {"target_modules": ["q_prj"]},
            "policy.lora.target_modules: no module is called 'q_prj'; linear layers of this",
        ),
        ({"target_modules": ".*nothing"}, "policy.lora.target_modules='.*nothing': matches no layer"),
        (
            {"target_modules": ["embed_tokens"]},
            "policy.lora.target_modules=['embed_tokens']: model.embed_tokens is no lin",
        ),
        ({"target_modules": ["lm_head"]}, "policy.lora.target_modules=['lm_head']: lm_head is the output layer"),
        ({"target_modules": ["mlp"]}, "policy.lora.target_modules=['mlp']: model.layers.0.mlp is no linear layer"),
        ({"target_modules": "(.+)+[A-Z]"}, "policy.lora.target_modules='(.+)+[A-Z]': takes more than 1 s to match"),
        ({"exclude_modules": "(.+)+[A-Z]"}, "policy.lora.exclude_modules='(.+)+[A-Z]': takes more than 1 s to match"),
    ],
)
def test_wrong_targets_are_named_in_one_line(world, model_folder, monkeypatch, lora, line):
    monkeypatch.setattr(weights, "REGEX_SECONDS", 1.0)
    with pytest.raises(ConfigError) as caught:
        policy_of(lora_config(model_folder(), **lora), world)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, {"q_proj", "v_proj"}),
        ({"target_modules": r".*\.(gate|up)_proj"}, {"gate_proj", "up_proj"}),
        ({"exclude_modules": ["o_proj", "down_proj"]}, {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}),
    ],
)
def test_targets_are_chosen_as_in_peft(world, model_folder, lora, expected):
    policy = policy_of(lora_config(model_folder(), **lora), world)
    base = AutoModelForCausalLM.from_pretrained(model_folder())
    names = {"target_modules": "all-linear", **lora}
    peft_model = get_peft_model(base, LoraConfig(r=4, **names))
    theirs = [name.replace(".default", "") for name, p in peft_model.named_parameters() if p.requires_grad]
    assert list(policy.parameters()) == theirs
    assert {name.split(".")[-3] for name in policy.parameters()} == expected


def test_compiled_blocks_give_the_same_gradients(world, model_folder, monkeypatch):
    # aot_eager: tracing is what can fail here, and generating code would take a minute.
    monkeypatch.setattr(Block, "compile", partialmethod(Block.compile, backend="aot_eager"))
    gradients = {}
    for compiled in ("off", "on"):
        config = lora_config(model_folder())
        policy = policy_of(with_policy(config, compile=compiled == "on"), world)
        move(policy)
        minibatch = pack_for(world, random_groups(1, 3), config).minibatches[0]
        assert len(minibatch.micro_batches) == 1, "each further size is traced again"
        policy.forward_backward(minibatch, Metrics(world.device))
        gradients[compiled] = gradients_of(policy)
    assert_same(gradients["on"], gradients["off"], rtol=1e-4, atol=1e-5)


def test_of_a_mixture_of_experts_attention_and_shared_layers_get_adapters():
    config = Qwen2MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
    )
    model = build_empty(config, 64, trust_remote_code=False)
    total = sum(parameter.numel() for parameter in model.parameters())
    insert_adapters(model.lm, LoRAConfig(rank=4))
    adapted = {name.split(".", 3)[-1] for name in adapted_layers(model)}
    attention = {f"self_attn.{part}_proj" for part in "qkvo"}
    shared = {f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
    assert attention | shared <= adapted
    assert not any("experts" in name for name in adapted)
    assert frozen_experts(model) == 2 * 4 * 3 * 32 * 16 < total


def gradients_where_one_rank_lacks_a_layer(world: World, folder: Path) -> dict[str, Tensor]:
    policy = policy_of(lora_config(folder), world)
    for index, master in enumerate(policy.parameters().values()):
        master.grad = None if index == 2 and world.rank == 1 else torch.full_like(master, 1.0 + world.rank)
    policy.weights.reduce_gradients()
    return gradients_of(policy)


def test_a_layer_that_one_rank_has_not_reached_gets_the_gradient_of_the_others(model_folder):
    first, second = run_on_ranks(gradients_where_one_rank_lacks_a_layer, 2, model_folder())
    assert_same(first, second, rtol=0, atol=0)
    sums = [gradient.unique().tolist() for gradient in first.values()]
    assert sums[:4] == [[3.0], [3.0], [1.0], [3.0]]
