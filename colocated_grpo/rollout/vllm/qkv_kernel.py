"""What stands between projecting queries, keys and values and attending, in one kernel.

For models that normalise and rotate each head (Qwen3 and its kin) vLLM launches four kernels here, in each layer:
two normalise, one rotates, one writes the cache. One launch reads and writes every number once; its times:
docs/results/decode_launches_1xh200.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models import qwen3, qwen3_moe
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

HEAD_SIZES = (64, 128, 256)
NUMBERS_PER_WARP = 1024
Forward = Callable[..., Tensor]


class Cache(NamedTuple):
    """Where a layer's keys and values go."""

    blocks: Tensor
    """[blocks, key-value heads, block size, 2 x head size], keys before values."""
    slots: Tensor
    """Of each token: block x block size + place in the block; -1: nowhere. Padding at the end has none. int64."""


def install() -> None:
    """Let these models' attention use the kernel where it applies. Before graphs are captured."""
    for attention in (qwen3.Qwen3Attention, qwen3_moe.Qwen3MoeAttention):
        if attention.forward.__module__ != __name__:
            attention.forward = _fused(attention.forward)


def _fused(separate: Forward) -> Forward:
    def forward(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
        cache = _cache_of(self.attn, hidden_states.dtype) if suits(self, positions, hidden_states) else None
        if cache is None:
            return separate(self, positions, hidden_states)
        qkv, _ = self.qkv_proj(hidden_states)
        normalize_rotate_and_store(self, qkv, positions, cache)
        # Without keys and values vLLM takes the cache as written.
        output, _ = self.o_proj(self.attn(qkv[:, : self.q_size], None, None))
        return output

    return forward


def suits(attention: nn.Module, positions: Tensor, hidden: Tensor) -> bool:
    rotary = attention.rotary_emb
    return (
        type(rotary) is RotaryEmbedding
        and rotary.is_neox_style
        and rotary.rotary_dim == attention.head_dim
        and attention.head_dim in HEAD_SIZES
        and positions.dim() == 1
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
    )


def _cache_of(layer: Any, dtype: torch.dtype) -> Cache | None:
    """None where the layer keeps its cache in another form, or has none yet."""
    owns_one = layer.attn_type == AttentionType.DECODER and layer.kv_sharing_target_layer_name is None
    if type(layer.impl) is not FlashAttentionImpl or layer.impl.dcp_world_size > 1 or not owns_one:
        return None
    _, _, blocks, slots = get_attention_context(layer.layer_name)
    is_plain = (
        slots is not None
        and blocks.dtype == dtype
        and blocks.dim() == 4
        and blocks.shape[1] == layer.num_kv_heads
        and blocks.shape[3] == 2 * layer.head_size
        and blocks.stride(3) == 1
    )
    return Cache(blocks, slots) if is_plain else None


def normalize_rotate_and_store(attention: nn.Module, qkv: Tensor, positions: Tensor, cache: Cache) -> None:
    """Queries in place, keys and values into the cache; qkv: [T, (query + 2 x key-value heads) x head size]."""
    rotary, size = attention.rotary_emb, attention.head_dim
    rows = triton.next_power_of_2(attention.num_heads + 2 * attention.num_kv_heads)
    _prepare[(len(qkv),)](
        qkv, cache.blocks, cache.slots, len(cache.slots), positions,
        attention.q_norm.weight, attention.k_norm.weight, rotary._match_cos_sin_cache_dtype(qkv),
        attention.q_norm.variance_epsilon, qkv.stride(0), *cache.blocks.stride()[:3],
        QUERIES=attention.num_heads, KEYS=attention.num_kv_heads, ROWS=rows, SIZE=size, BLOCK=cache.blocks.shape[2],
        num_warps=max(1, min(16, rows * size // NUMBERS_PER_WARP)),
    )  # fmt: skip


@triton.jit
def _prepare(
    qkv, blocks, slots, num_slots, positions, query_weight, key_weight, cos_sin,
    epsilon, token_stride, block_stride, head_stride, place_stride,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = SIZE // 2
    token = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)[:, None]  # heads: queries, keys, values
    column = tl.arange(0, HALF)[None, :]
    is_query = row < QUERIES
    is_value = row >= QUERIES + KEYS
    real = row < QUERIES + 2 * KEYS
    at = qkv + token * token_stride + row * SIZE + column
    left = tl.load(at, mask=real, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)

    square = (tl.sum(left * left, 1) + tl.sum(right * right, 1)) / SIZE
    scale = tl.rsqrt(square + epsilon)[:, None]
    weight_left = tl.where(is_query, tl.load(query_weight + column), tl.load(key_weight + column))
    weight_right = tl.where(is_query, tl.load(query_weight + HALF + column), tl.load(key_weight + HALF + column))
    x = left * scale * weight_left.to(tl.float32)
    y = right * scale * weight_right.to(tl.float32)

    angle = cos_sin + tl.load(positions + token) * SIZE + column
    cos, sin = tl.load(angle).to(tl.float32), tl.load(angle + HALF).to(tl.float32)
    left = tl.where(is_value, left, x * cos - y * sin).to(qkv.dtype.element_ty)
    right = tl.where(is_value, right, y * cos + x * sin).to(qkv.dtype.element_ty)
    tl.store(at, left, mask=is_query)
    tl.store(at + HALF, right, mask=is_query)

    slot = tl.load(slots + token, mask=token < num_slots, other=-1)
    if slot >= 0:
        head = tl.where(is_value, row - QUERIES - KEYS, row - QUERIES)
        to = blocks + slot // BLOCK * block_stride + head * head_stride + slot % BLOCK * place_stride + column
        to += tl.where(is_value, SIZE, 0)
        stored = real & (row >= QUERIES)
        tl.store(to, left, mask=stored)
        tl.store(to + HALF, right, mask=stored)
