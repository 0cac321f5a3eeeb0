"""Normalising and rotating queries and keys in one kernel, for models that do both to each head (Qwen3 and its kin).

vLLM has the kernel and reaches it through its compiler only, which a quick start goes without. Called directly it
replaces three launches in each layer; times of both: docs/results/decode_kernels_1xh200.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models import qwen3, qwen3_moe

HEAD_SIZES = (64, 128, 256)
Forward = Callable[..., Tensor]


def install() -> None:
    """Let these models' attention use the kernel where it applies. Before graphs are captured."""
    for attention in (qwen3.Qwen3Attention, qwen3_moe.Qwen3MoeAttention):
        if attention.forward.__module__ != __name__:
            attention.forward = _fused(attention.forward)


def _fused(separate: Forward) -> Forward:
    def forward(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
        if not suits(self, positions, hidden_states):
            return separate(self, positions, hidden_states)
        qkv, _ = self.qkv_proj(hidden_states)
        normalize_and_rotate(self, qkv, positions)
        output, _ = self.o_proj(self.attn(*qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)))
        return output

    return forward


def suits(attention: nn.Module, positions: Tensor, hidden: Tensor) -> bool:
    rotary = attention.rotary_emb
    return (
        type(rotary) is RotaryEmbedding
        and rotary.rotary_dim == attention.head_dim
        and attention.head_dim in HEAD_SIZES
        and positions.dim() == 1
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
    )


def normalize_and_rotate(attention: nn.Module, qkv: Tensor, positions: Tensor) -> None:
    """In place; qkv: [T, (query + 2 x key-value heads) x head size]."""
    rotary = attention.rotary_emb
    torch.ops._C.fused_qk_norm_rope(
        qkv,
        attention.num_heads,
        attention.num_kv_heads,
        attention.num_kv_heads,
        attention.head_dim,
        attention.q_norm.variance_epsilon,
        attention.q_norm.weight,
        attention.k_norm.weight,
        rotary._match_cos_sin_cache_dtype(qkv),
        rotary.is_neox_style,
        positions,
        -1,
    )
