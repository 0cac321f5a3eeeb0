"""Entries of config.json that vLLM needs but transformers writes under other names or not at all."""

from __future__ import annotations

import math

from colocated_grpo.settings.config_json import text_part
from colocated_grpo.settings.model_support import has_latent_attention
from colocated_grpo.types import JsonObject

SIGMOID_ROUTER: JsonObject = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""The only router that transformers has for DeepSeek-V3. vLLM's default is the softmax of DeepSeek-V2."""


def overrides(config_json: JsonObject) -> JsonObject:
    """Return the entries for this model, as vLLM's `hf_overrides`."""
    if has_latent_attention(config_json):
        return SIGMOID_ROUTER
    rope = text_part(config_json).get("rope_parameters") or {}
    return _query_scale(rope) | _yarn_scale(rope)


def _query_scale(rope: JsonObject) -> JsonObject:
    """Return the entry that scales queries by their position, as in Ministral 3."""
    if rope.get("llama_4_scaling_beta") is None:
        return {}
    key = "original_max_position_embeddings"
    return {"llama_4_scaling": {"beta": rope["llama_4_scaling_beta"], key: rope[key]}}


def _yarn_scale(rope: JsonObject) -> JsonObject:
    """Return rope parameters with an explicit YaRN scale, also under vLLM 0.26's names; {} if the default applies."""
    if rope.get("rope_type") != "yarn":
        return {}
    scale = rope.get("attention_factor")
    if scale is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        scale = _mscale(rope, rope["mscale"]) / _mscale(rope, rope["mscale_all_dim"])
    if scale is None:
        return {}
    names = {"attention_factor": scale, "attn_factor": scale, "apply_yarn_scaling": False}
    return {"rope_parameters": rope | names}


def _mscale(rope: JsonObject, mscale: float) -> float:
    """Return the scale of the YaRN paper, 0.1 ln(factor) + 1, with `mscale` times the logarithm."""
    return 0.1 * mscale * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0
