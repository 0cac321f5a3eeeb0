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

from colocated_grpo.config.errors import ConfigError
from colocated_grpo.config.families import FAMILIES
from colocated_grpo.config.model_support import (
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
from colocated_grpo.tools.char_tokenizer import build_char_tokenizer
from colocated_grpo.tools.make_model import ARCHITECTURES, model_config
from colocated_grpo.tools.shapes import TINY
from tests.support.families import GEMMA4, SETTINGS

MODELS = Path(transformers.__file__).parent / "models"
EXPERTS, COMPOSITE, STATE = "a mixture of experts", "parts beside the language model", "layers that carry a state"
REFUSED = {
    "deepseek_v3": EXPERTS,
    "granitemoe": EXPERTS,
    "dbrx": EXPERTS,
    "qwen2_5_vl": COMPOSITE,
    "qwen3_vl": COMPOSITE,
    "mistral3": COMPOSITE,
    "llava": COMPOSITE,
    "smolvlm": COMPOSITE,
    "gemma3": COMPOSITE,
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
    "quantized weights": {"quantization_config": {"quant_method": "fp8"}},
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


def test_a_model_without_a_test_is_said_to_have_none():
    assert verdict({"model_type": "olmo2"}) == "trains (olmo2, not among the tested families)"


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
