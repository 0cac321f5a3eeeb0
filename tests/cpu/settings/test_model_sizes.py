"""Parameters, adapters, activations and KV cache by config.json alone are those of the models that it describes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, DeepseekV3Config, GPT2Config, PreTrainedModel, Qwen3Config

from colocated_grpo.policy.lora.weights import target_names
from colocated_grpo.settings.model_sizes import Sizes, sizes_of
from colocated_grpo.settings.run_sizes import Placement, RunSizes, adapter_parameters
from colocated_grpo.settings.training import LoRAConfig
from colocated_grpo.tools.shapes import ARCHITECTURES
from tests.support.config_text import load
from tests.support.real_sizes import config_json, empty_model, num_parameters

HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
FUSED = ("glm4", "gpt2", "phi3")
"""Their linear layers are fused, so adapters have fewer parameters than the arithmetic says."""
DELTA_RULE = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
QWEN3_NEXT: dict[str, Any] = DELTA_RULE | {
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
"""The entries with sizes that the released Qwen3-Next 80B states."""


def known_sizes(config: dict) -> Sizes:
    """Return the sizes by the text of config.json."""
    sizes = sizes_of(json.loads(json.dumps(config)))
    assert sizes is not None
    return sizes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_are_counted_from_config_json_alone(architecture):
    config = config_json("qwen3-1.7b", architecture)
    assert known_sizes(config).total == pytest.approx(num_parameters(config), rel=5e-4)


@pytest.mark.parametrize("shape", ["qwen3.5-4b", "qwen3.5-9b"])
def test_parameters_of_a_hybrid_of_real_size_are_counted(shape):
    config = config_json(shape)
    assert known_sizes(config).total == pytest.approx(num_parameters(config), rel=1e-4)


def test_the_sizes_of_a_whole_model_are_those_of_its_text_part():
    """The entries are those that the released Gemma 3 4B states."""
    stated = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    vision = {"vision_config": AutoConfig.for_model("siglip_vision_model").to_dict()}
    sizes = known_sizes({"model_type": "gemma3", "text_config": stated, **vision})
    assert sizes.total == pytest.approx(num_parameters(AutoConfig.for_model(**stated).to_dict()), rel=2e-3)


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_5_moe"])
def test_the_sizes_of_a_whole_hybrid_are_those_of_its_text_part(architecture):
    text = config_json("qwen3-1.7b", architecture)
    whole = AutoConfig.for_model(architecture, text_config=text, tie_word_embeddings=True).to_dict()
    assert whole["vision_config"] and "hidden_size" not in whole
    assert known_sizes(whole) == known_sizes(text)


def test_a_hybrid_that_states_an_interval_has_full_attention_in_every_so_many_layers():
    assert known_sizes(QWEN3_NEXT).total == pytest.approx(num_parameters(QWEN3_NEXT), rel=5e-5)
    thirds = QWEN3_NEXT | {"full_attention_interval": 3, "num_experts": 8, "num_hidden_layers": 46}
    assert known_sizes(thirds).total == pytest.approx(num_parameters(thirds), rel=2e-4)
    layers = {key: entry for key, entry in QWEN3_NEXT.items() if key != "full_attention_interval"}
    assert known_sizes(layers) == known_sizes(QWEN3_NEXT)


def test_parameters_of_a_mixture_of_experts_are_counted():
    changes = {"num_experts": 16, "moe_intermediate_size": 768, "num_hidden_layers": 4, "hidden_size": 1024}
    config = AutoConfig.for_model("qwen3_moe", **changes).to_dict()
    assert known_sizes(config).total == pytest.approx(num_parameters(config), rel=2e-3)


@pytest.mark.parametrize(
    "dense",
    [{"decoder_sparse_step": 3}, {"mlp_only_layers": [0, 7]}, {"decoder_sparse_step": 2, "mlp_only_layers": [3]}],
)
@pytest.mark.parametrize("architecture", ["qwen2_moe", "qwen3_moe", "qwen3_next"])
def test_blocks_with_an_mlp_in_place_of_experts_are_counted(architecture, dense):
    config = config_json("qwen3-1.7b", architecture) | dense
    assert known_sizes(config).total == pytest.approx(num_parameters(config), rel=5e-4)


def test_a_config_json_without_sizes_gives_none():
    assert sizes_of({"model_type": "mystery"}) is None
    assert sizes_of({key: entry for key, entry in QWEN3_NEXT.items() if key != "linear_key_head_dim"}) is None


def test_linear_attention_of_another_kind_has_sizes_that_are_not_known():
    config = config_json("qwen3-1.7b") | {"model_type": "another"}
    assert sizes_of(config) is not None
    assert sizes_of(config | DELTA_RULE | {"layer_types": ["linear_attention"] * 28}) is None


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in FUSED])
def test_an_adapter_has_the_layers_that_the_policy_gives_one(architecture):
    config = config_json("qwen3-1.7b", architecture)
    model, sizes = empty_model(config), known_sizes(config)

    def factors(lora: LoRAConfig) -> int:
        names = target_names(model, lora)
        return sum(lora.rank * sum(model.get_submodule(name).weight.shape) for name in names)

    some_blocks = {"layers": list(range(7, 14))}
    for settings in ({}, some_blocks, {"target_modules": ["q_proj", "o_proj"]}):
        lora = LoRAConfig(rank=8, **settings)
        assert adapter_parameters(lora, sizes) == factors(lora), settings
    if architecture in HYBRIDS:
        lora = LoRAConfig(rank=8, target_modules=["q_proj", "out_proj"], **some_blocks)
        assert adapter_parameters(lora, sizes) == factors(lora)


def test_an_adapter_s_parameters_are_those_of_its_layers():
    sizes = known_sizes(config_json())
    everything = adapter_parameters(LoRAConfig(rank=8), sizes)
    assert everything == 8 * 36 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    half = adapter_parameters(LoRAConfig(rank=8, layers=list(range(18))), sizes)
    assert half == everything / 2
    queries = adapter_parameters(LoRAConfig(rank=8, target_modules=["q_proj", "v_proj"]), sizes)
    assert queries == 8 * 36 * (4096 + 4096 + 4096 + 1024)


@pytest.mark.parametrize("ranks", [1, 2])
def test_latent_attention_caches_one_vector_for_all_heads_on_each_rank(ranks):
    sizes = known_sizes(DeepseekV3Config(num_hidden_layers=3, kv_lora_rank=512, qk_rope_head_dim=64).to_dict())
    assert sizes.kv_bytes_per_token(2, ranks) == 3 * (512 + 64) * 2


@pytest.mark.parametrize(("ranks", "heads_here"), [(1, 4), (2, 2), (8, 1)])
def test_tensor_parallel_ranks_split_key_value_heads_down_to_one_each(ranks, heads_here):
    settings = Qwen3Config(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=16).to_dict()
    assert known_sizes(settings).kv_bytes_per_token(2, ranks) == 3 * 2 * heads_here * 16 * 2


def test_a_model_without_num_key_value_heads_has_as_many_as_query_heads():
    sizes = known_sizes(GPT2Config(n_layer=3, n_head=8, n_embd=48).to_dict())
    assert sizes.kv_bytes_per_token(4) == 3 * 2 * 8 * 6 * 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sequence_of_a_hybrid_takes_its_keys_values_and_states(ranks):
    """8 of 32 blocks have full attention; a state has float32 numbers, a convolution those of the model's type."""
    sizes = known_sizes(config_json("qwen3.5-4b") | DELTA_RULE)
    values, window = 32 * 128, 3 * (2 * 16 * 128 + 32 * 128)
    assert sizes.kv_bytes_per_token(2, ranks) == 8 * 2 * 4 // ranks * 256 * 2
    assert sizes.state_bytes(2, ranks) == 24 * (2 * window + 4 * values * 128) // ranks
    place = Placement(ranks=8, on_gpu=True, device_bytes=0)
    run = load(f"engine: {{max_model_len: 3000, tensor_parallel_size: {ranks}}}")
    planned = 3000 * sizes.kv_bytes_per_token(2, ranks) + sizes.state_bytes(2, ranks)
    assert RunSizes(run, sizes, place).kv_bytes_per_sequence() == planned


def kept_by(model: PreTrainedModel, index: int, tokens: int) -> int:
    """Return the numbers that autograd keeps for the backward pass of a block, weights left out."""
    weights = {id(parameter) for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in weights and id(tensor._base) not in weights:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    hidden = torch.zeros(1, tokens, model.config.hidden_size, dtype=model.dtype, device="meta", requires_grad=True)
    angles = model.model.rotary_emb(hidden, torch.arange(tokens, device="meta")[None])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.layers[index](hidden, position_embeddings=angles, attention_mask=None)
    return sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in kept.values())


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe", *HYBRIDS])
def test_a_block_keeps_the_activations_of_the_arithmetic_and_less_than_three_times_as_many(architecture, index):
    """It also keeps inputs of norms, rotated queries and keys, and what the delta rule computes in between."""
    config = config_json("qwen3-1.7b", architecture)
    sizes = known_sizes(config)
    kept = kept_by(empty_model(config, torch.bfloat16), index, tokens=64)
    assert 1 < kept / (64 * sizes.blocks[index].activations(sizes.hidden)) < 3
