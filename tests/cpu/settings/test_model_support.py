"""config.json alone decides whether a model trains: one line with the feature that does not."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from colocated_grpo.settings.config_json import DEFAULTS, MODULES, OTHER_PARTS, TRAINED_AS, text_part
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.families import FAMILIES
from colocated_grpo.settings.model_support import (
    CPU_ENGINE_HEAD_SIZES,
    OWN_ATTENTION_TYPES,
    RULES,
    check_cpu_engine,
    check_has_experts,
    check_trains,
    has_linear_attention,
    head_sizes,
    refusals,
    verdict,
)
from colocated_grpo.tools.make_model import build_char_tokenizer, model_config
from colocated_grpo.tools.shapes import ARCHITECTURES, TINY
from tests.support.families import GEMMA4, SETTINGS

MODELS = Path(transformers.__file__).parent / "models"
EXPERTS, COMPOSITE, STATE = "a mixture of experts", "parts beside the language model", "layers that carry a state"
REFUSED = {
    "deepseek_v2": EXPERTS,
    "granitemoe": EXPERTS,
    "dbrx": EXPERTS,
    "qwen2_5_vl": COMPOSITE,
    "qwen3_vl_moe": COMPOSITE,
    "llava": COMPOSITE,
    "smolvlm": COMPOSITE,
    "paligemma": COMPOSITE,
    "gemma3n": COMPOSITE,
    "olmo_hybrid": STATE,
    "lfm2": STATE,
    "minimax": STATE,
    "jamba": STATE,
    "mamba2": STATE,
    "llama4_text": "attention within chunks",
    "minicpm3": "latent attention",
    "bloom": "attention outside transformers' interface",
    "phi": "an output layer with a bias",
    "gpt_neox": "checkpoints whose tensors have other names",
    "bart": "an encoder",
}
SETTINGS_OF = {
    "quantized weights": {"quantization_config": {"quant_method": "mxfp4"}},
    "attention to later tokens": {"use_bidirectional_attention": "all"},
    "logits that are both scaled and soft-capped": {"logit_scale": 0.5, "final_logit_softcapping": 30.0},
}


def test_every_rule_is_tested():
    shown = {*REFUSED.values(), *SETTINGS_OF}
    assert [rule.feature for rule in RULES if not any(rule.feature.startswith(text) for text in shown)] == []


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_does_not_train_is_refused_in_one_line_with_the_feature(model_type):
    config_json = AutoConfig.for_model(model_type).to_dict()
    with pytest.raises(ConfigError) as caught:
        check_trains(config_json, "model.name='x'")
    assert str(caught.value).startswith(f"model.name='x': model type '{model_type}' does not train because it has ")
    assert REFUSED[model_type] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("feature", SETTINGS_OF)
def test_a_setting_that_does_not_train_is_refused_in_any_family(feature):
    [found] = refusals({"model_type": "qwen3", **SETTINGS_OF[feature]})
    assert found.startswith(feature)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_every_tested_family_trains(family):
    shape = replace(TINY, architecture=family.architecture, settings=SETTINGS[family.architecture])
    config = model_config(shape, build_char_tokenizer())
    assert refusals(config.to_dict()) == []
    refusal = nullcontext() if family.experts else pytest.raises(ConfigError, match=r"^replay: needs a mixture of exp")
    with refusal:
        check_has_experts(config.to_dict(), "replay")
    assert verdict(config.to_dict()) == f"trains ({family.name})"
    assert ARCHITECTURES[family.architecture] == family.model_type


@pytest.mark.parametrize(
    ("model_type", "line"),
    [
        ("gemma3", "trains (Gemma 3, text; its vision part is left out)"),
        ("mistral3", "trains (Mistral; its vision part is left out)"),
        ("qwen3_vl", "trains (Qwen 3; its vision part is left out)"),
        ("qwen3_5", "trains (Qwen 3.5; its vision part is left out)"),
        ("qwen3_5_moe", "trains (Qwen 3.5 MoE; its vision part is left out)"),
    ],
)
def test_the_text_part_of_a_vision_language_model_trains(model_type, line):
    config_json = AutoConfig.for_model(model_type).to_dict()
    assert refusals(config_json) == []
    assert verdict(config_json) == line


def test_every_part_that_is_left_out_is_named():
    parts = {key: AutoConfig.for_model(f"gemma4_{kind}").to_dict() for key, kind in OTHER_PARTS.items()}
    config_json = {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}
    assert verdict(config_json) == "trains (Gemma 4, text)"
    assert verdict(config_json | parts) == "trains (Gemma 4, text; its vision and audio parts are left out)"


@pytest.mark.parametrize(
    ("config_json", "feature"),
    [
        ({"model_type": "mistral3", "text_config": {"model_type": "llama"}}, COMPOSITE),
        ({"model_type": "paligemma", "text_config": {"model_type": "gemma3_text"}}, COMPOSITE),
        ({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "enable_moe_block": True}}, EXPERTS),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral"}, "quantization_config": {"bits": 8}},
            "quantized weights",
        ),
    ],
    ids=["text part of another model", "another whole", "part with experts", "quantized whole"],
)
def test_a_part_that_does_not_train_is_refused(config_json, feature):
    if feature is EXPERTS:
        config_json["text_config"]["num_experts"] = 8
    [found] = refusals(config_json)
    assert found.startswith(feature)


def test_entries_that_released_models_leave_out_are_those_of_transformers():
    for model_type, entries in DEFAULTS.items():
        config_json = AutoConfig.for_model(model_type).to_dict()
        assert {key: config_json[key] for key in entries} == entries
        assert text_part({"model_type": model_type, "vocab_size": 7}) == {
            "model_type": model_type,
            **entries,
            "vocab_size": 7,
        }


def test_text_parts_have_the_class_that_transformers_chooses_for_them_alone():
    for (_, text_type), module in MODULES.items():
        assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TRAINED_AS.get(text_type, text_type)] == module


def test_a_model_without_a_test_is_said_to_have_none():
    assert verdict({"model_type": "olmo2"}) == "olmo2 is not among the tested families"


def test_every_language_model_outside_transformers_attention_interface_is_refused():
    """Otherwise packed sequences would see each other, without any error."""
    own = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not calls_interface(name)}
    assert own >= OWN_ATTENTION_TYPES
    assert {name for name in own if not refusals({"model_type": name})} == set()


def calls_interface(model_type: str) -> bool:
    """Return True if the model's source does, or if the model consists of others."""
    module = model_type_to_module_name(model_type)
    source = "".join(file.read_text() for file in (MODELS / module).glob("modeling_*.py"))
    return "ALL_ATTENTION_FUNCTIONS" in source or re.search(r"^class \w*Attention\w*\(", source, re.MULTILINE) is None


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, set()),
        ({"head_dim": 128, "num_attention_heads": 16, "hidden_size": 1024}, {128}),
        ({"num_attention_heads": 16, "hidden_size": 1024}, {64}),
        ({"n_head": 12, "n_embd": 768}, {64}),
        ({"text_config": {"head_dim": 256}}, {256}),
        (
            {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64},
            {128, 192},
        ),
        ({"model_type": "gemma4_text", "head_dim": 256}, {256, 512}),
        ({"model_type": "gemma4_text", "head_dim": 256, "per_layer_config": {"5": {"head_dim": 128}}}, {128, 256}),
    ],
)
def test_head_sizes_are_read_from_config_json(settings, sizes):
    assert head_sizes(settings) == sizes


def test_head_sizes_of_a_real_config_are_those_of_its_layers():
    config = model_config(replace(TINY, architecture="gemma4", settings=GEMMA4), build_char_tokenizer())
    assert head_sizes(config.to_dict()) == {TINY.head_dim, GEMMA4["global_head_dim"]}


def test_a_head_size_that_the_cpu_engine_lacks_is_one_line():
    check_cpu_engine({"head_dim": 64}, "model.name='x'", bfloat16=False)
    with pytest.raises(
        ConfigError, match=r"^model.name='x': heads of 16, but vLLM's engine for CPUs supports 32, 64, "
    ):
        check_cpu_engine({"head_dim": 16}, "model.name='x'", bfloat16=False)


def test_an_adapter_beside_experts_that_the_cpu_engine_lacks_is_one_line():
    mixture, setting = {"model_type": "qwen3_moe", "num_experts": 8}, "model.name='x'"
    check_cpu_engine(mixture, setting, bfloat16=False)
    check_cpu_engine({"model_type": "qwen3"}, setting, bfloat16=False, adapters=True)
    with pytest.raises(ConfigError, match=r"^model.name='x': vLLM's engine for CPUs loads no adapter beside a mix"):
        check_cpu_engine(mixture, setting, bfloat16=False, adapters=True)


def test_a_latent_size_that_the_cpu_engine_lacks_is_one_line():
    config_json = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    check_cpu_engine(config_json, "model.name='x'", bfloat16=False)
    with pytest.raises(
        ConfigError, match=r"^model.name='x': kv_lora_rank=256, but vLLM's engine for CPUs supports 512;"
    ):
        check_cpu_engine(config_json | {"kv_lora_rank": 256}, "model.name='x'", bfloat16=False)


def test_a_model_of_linear_attention_is_known_by_its_type_where_its_layers_are_not_listed():
    assert has_linear_attention({"model_type": "qwen3_next", "full_attention_interval": 4})
    assert has_linear_attention({"text_config": {"layer_types": ["full_attention", "linear_attention"]}})
    assert not has_linear_attention({"model_type": "qwen3"})


@pytest.mark.parametrize(
    ("size", "bfloat16", "rule"),
    [
        (128, False, "has linear attention in bfloat16 only; set policy.compute_dtype: bfloat16"),
        (96, True, "linear_key_head_dim=96, but vLLM's engine for CPUs supports 64, 128; train on a GPU"),
    ],
)
def test_linear_attention_that_the_cpu_engine_lacks_is_one_line(size, bfloat16, rule):
    config_json = {"layer_types": ["linear_attention"], "linear_key_head_dim": size, "linear_value_head_dim": 64}
    with pytest.raises(ConfigError, match=f"^model.name='x': .*{rule}"):
        check_cpu_engine(config_json, "model.name='x'", bfloat16=bfloat16)


def test_the_head_sizes_of_the_cpu_engine_are_vllms():
    """Read from vLLM's source: its import takes seconds."""
    source = (Path(find_spec("vllm").origin).parent / "v1/attention/backends/cpu_attn.py").read_text()
    [sizes] = re.findall(r"def get_supported_head_sizes\(cls\).*\n\s+return \[([\d, ]+)\]", source)
    assert list(CPU_ENGINE_HEAD_SIZES) == [int(size) for size in sizes.split(",")]
