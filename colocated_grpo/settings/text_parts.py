"""The models that train as the text part of a larger one, and the names of their tensors there. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODULES = {
    ("gemma3", "gemma3_text"): "Gemma3ForCausalLM",
    ("gemma4", "gemma4_text"): "Gemma4ForCausalLM",
    ("mistral3", "ministral3"): "Ministral3ForCausalLM",
    ("mistral3", "mistral"): "MistralForCausalLM",
    ("qwen3_vl", "qwen3_vl_text"): "Qwen3ForCausalLM",
    ("qwen3_5", "qwen3_5_text"): "Qwen3_5ForCausalLM",
    ("qwen3_5_moe", "qwen3_5_moe_text"): "Qwen3_5MoeForCausalLM",
}
"""Model types of the whole and of its text part -> the part's class in transformers and vLLM. The part alone computes
text as the whole does. In pairs that are not listed, the whole may add to what its text part computes."""
TRAINED_AS = {"qwen3_vl_text": "qwen3"}
"""Model type of a text part -> the type that computes the same for text. Positions of Qwen3-VL have three coordinates,
which are equal without images."""
DEFAULTS: dict[object, Mapping[str, Any]] = {
    "gemma3_text": {
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
    }
}
"""Model type -> transformers' values of entries that config.json of released models leaves out."""
OTHER_PARTS = {"vision_config": "vision", "audio_config": "audio"}
"""Section of config.json -> name of the part."""
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
"""Beginnings of names in checkpoints -> in the text model alone. Gemma 3 and Mistral 3 are stored with the second and
third, Gemma 4 and Qwen with the first and last."""


def module_of(model_type: object, text_type: object) -> str | None:
    """Return the name of the class of a text part that trains; None for other pairs of model types."""
    return next((module for types, module in MODULES.items() if types == (model_type, text_type)), None)


def has_text_part(config_json: Mapping[str, Any]) -> bool:
    """Return True for a model of several parts of which the text part trains alone."""
    text = config_json.get("text_config") or {}
    return module_of(config_json.get("model_type"), text.get("model_type")) is not None


def text_part(config_json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the language model in a config.json."""
    text = config_json.get("text_config") or config_json
    kind = text.get("model_type")
    if kind in TRAINED_AS:
        text = {**text, "model_type": TRAINED_AS[kind]}
    return {**DEFAULTS.get(kind, {}), **text}


def attention_heads(text: Mapping[str, Any]) -> int | None:
    """Return the number of attention heads in settings of a language model; None if they do not say."""
    return text.get("num_attention_heads") or text.get("n_head")


def left_out(config_json: Mapping[str, Any]) -> str:
    """Return what does not train, such as '; its vision and audio parts are left out'; empty if all does."""
    names = [name for key, name in OTHER_PARTS.items() if config_json.get(key)]
    if not names or not has_text_part(config_json):
        return ""
    return f"; its {' and '.join(names)} part{'s are' if len(names) > 1 else ' is'} left out"


def text_name(stored_name: str) -> str | None:
    """Return the name that a tensor of a whole model's checkpoint has in its text part; None for other parts."""
    for stored, own in _PREFIXES.items():
        if stored_name.startswith(stored):
            return own + stored_name.removeprefix(stored)
    return None
