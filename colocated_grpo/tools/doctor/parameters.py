"""Numbers of parameters by the sizes in a config.json. Norms and biases, below a thousandth, are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colocated_grpo.config.model_support import has_linear_attention
from colocated_grpo.config.text_parts import text_part

TIED_BY_DEFAULT = ("gemma", "gpt2")
"""Families whose config.json may leave out that the output layer is the embedding matrix."""
UNGATED = {"bloom", "falcon", "gpt2", "gpt_neox", "gptj", "opt", "phi", "starcoder2"}
"""Model types whose MLP has two linear layers, not three."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters of a decoder, by part."""

    blocks: int
    hidden: int
    intermediate: int
    vocab: int
    outside: int
    """Parameters outside the blocks: embeddings and output layer."""
    linear: Mapping[str, tuple[int, int]]
    """Linear layers of a block with their inputs and outputs, under Llama's names. Experts of a block are not here."""
    experts: int
    """Parameters of the experts of a block."""
    dense_blocks: int
    """Difference that the first blocks of a mixture make by having a dense MLP instead of experts, all together."""
    kv_width: int
    """Keys of one token in one block: key-value heads times head size."""

    @property
    def block(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.linear.values()) + self.experts

    @property
    def total(self) -> int:
        return self.outside + self.blocks * self.block + self.dense_blocks


def sizes_of(config_json: Mapping[str, Any]) -> Sizes | None:
    """Return the sizes of the model; None if config.json does not state them, or has layers of linear attention."""
    if has_linear_attention(config_json):
        return None
    model = text_part(config_json)
    hidden = _first(model, "hidden_size", "n_embd")
    blocks = _first(model, "num_hidden_layers", "n_layer")
    heads = _first(model, "num_attention_heads", "n_head")
    vocab = _first(model, "vocab_size")
    if not (hidden and blocks and heads and vocab):
        return None
    head_size = _first(model, "head_dim") or hidden // heads
    kv_width = (_first(model, "num_key_value_heads") or heads) * head_size
    intermediate = _first(model, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    linear = {
        "q_proj": (hidden, heads * head_size),
        "k_proj": (hidden, kv_width),
        "v_proj": (hidden, kv_width),
        "o_proj": (heads * head_size, hidden),
    }
    experts = _experts(model, hidden, intermediate)
    dense = _shared(model) if experts else intermediate
    num_dense_blocks = _first(model, "first_k_dense_replace") or 0 if experts else 0
    if dense:
        gate = {} if model.get("model_type") in UNGATED else {"gate_proj": (hidden, dense)}
        linear |= gate | {"up_proj": (hidden, dense), "down_proj": (dense, hidden)}
    return Sizes(
        blocks=blocks,
        hidden=hidden,
        intermediate=dense or intermediate,
        vocab=vocab,
        outside=vocab * hidden * (1 if _is_tied(config_json, model) else 2) + _positions(model) * hidden,
        linear=linear,
        experts=experts,
        dense_blocks=num_dense_blocks * (3 * hidden * (intermediate - dense) - experts),
        kv_width=kv_width,
    )


def _experts(model: Mapping[str, Any], hidden: int, intermediate: int) -> int:
    """Return the parameters of a block's experts and their router; 0 for a dense model."""
    count = _first(model, "num_experts", "num_local_experts", "n_routed_experts") or 0
    size = _first(model, "moe_intermediate_size") or intermediate
    return count * (3 * hidden * size + hidden)


def _shared(model: Mapping[str, Any]) -> int:
    """Return the width of a block's shared experts, which every token passes; 0 without any."""
    separate = (_first(model, "n_shared_experts") or 0) * (_first(model, "moe_intermediate_size") or 0)
    return _first(model, "shared_expert_intermediate_size") or separate


def _is_tied(config_json: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    default = str(model.get("model_type")).startswith(TIED_BY_DEFAULT)
    return bool(config_json.get("tie_word_embeddings", model.get("tie_word_embeddings", default)))


def _positions(model: Mapping[str, Any]) -> int:
    """Return the rows of a learned position embedding, which only GPT-2's family has."""
    return _first(model, "n_positions") or 0 if model.get("model_type") == "gpt2" else 0


def _first(model: Mapping[str, Any], *keys: str) -> int | None:
    return next((model[key] for key in keys if isinstance(model.get(key), int)), None)
