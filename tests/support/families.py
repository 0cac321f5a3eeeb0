"""Entries of config.json with which a small model of each family computes what released ones compute."""

from __future__ import annotations

from typing import Any

from tests.support.small_policy import SHAPE

WINDOW = {"sliding_window": 3}
MIXED_WINDOWS = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA4 = WINDOW | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": SHAPE.vocab,
    "final_logit_softcapping": 2.0,
    "initializer_range": 0.05,
}
"""As in small models, the last two layers use the keys and values of the first two, and each layer adds an input."""
GEMMA4_LARGE = MIXED_WINDOWS | {
    "global_head_dim": 64,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.05,
}
GRANITE = {
    "logits_scaling": 2.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.5,
}
MINISTRAL3 = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 4,
        "max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    }
}
"""Queries grow with the position, in steps of four tokens."""

UNTIED = {"tie_word_embeddings": False}
"""As all released models of the family: vLLM has no tied ones."""
TWO_OF_FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
ALIGNED = {"intermediate_size": 48}
"""Rows of whole 16 bytes, which grouped matrix products need."""
SMALL_EXPERTS = {"moe_intermediate_size": 32}
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 32.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""vLLM's table of rotary angles ends at 32 * 64 positions, which are those of the small models."""
DENSE_FIRST_LAYER = {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
LATENT = {"n_group": 2, "topk_group": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""vLLM's engine for CPUs has these two sizes only."""
WHOLE_QUERIES = {"q_lora_rank": None}
"""As in Moonlight: queries are computed from the hidden states directly."""
GPT_OSS = (
    MIXED_WINDOWS
    | UNTIED
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "rope_parameters": YARN,
    }
)
"""vLLM's engine for CPUs needs multiples of 32 where experts have biases."""

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "mistral": WINDOW,
    "gemma2": MIXED_WINDOWS | {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
    "gemma3": MIXED_WINDOWS,
    "gpt2": {},
    "gemma4": GEMMA4,
    "glm4": {},
    "granite": GRANITE,
    "ministral3": MINISTRAL3,
    "olmo3": MIXED_WINDOWS,
    "phi3": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "qwen3_5": DELTA_RULE,
    "qwen3_5_moe": DELTA_RULE | TWO_OF_FOUR | SMALL_EXPERTS | SHARED_EXPERT,
    "qwen3_next": DELTA_RULE | TWO_OF_FOUR | SMALL_EXPERTS | SHARED_EXPERT | UNTIED | {"norm_topk_prob": True},
    "qwen3_moe": TWO_OF_FOUR | SMALL_EXPERTS | {"norm_topk_prob": True},
    "qwen2_moe": TWO_OF_FOUR | SMALL_EXPERTS | SHARED_EXPERT,
    "olmoe": TWO_OF_FOUR | ALIGNED | UNTIED,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2} | ALIGNED,
    "gpt_oss": GPT_OSS,
    "glm4_moe": DENSE_FIRST_LAYER | SMALL_EXPERTS | UNTIED,
    "deepseek_v3": {"q_lora_rank": 32} | DENSE_FIRST_LAYER | SMALL_EXPERTS | UNTIED | LATENT,
}
"""By architecture. Models that the tests train, all of them rows of docs/models.md."""
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Those with linear attention, which vLLM's engine for CPUs computes in bfloat16 and with heads of 64 or 128 only."""
LARGE_STATES = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
"""Heads of linear attention that kernels for CPUs support."""
