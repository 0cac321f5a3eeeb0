"""One Triton kernel for the steps between the QKV projection and attention: norms, rotation, cache write.

For models that normalise and rotate each head (Qwen3 and Qwen3-MoE) vLLM launches four kernels in each layer: two
norms, one rotation, one cache write. This kernel reads and writes every number once, and rounds where those four do.
Times: docs/results/decode_launches_1xh200.json.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from colocated_grpo.rollout.vllm.decode_attention import FP8
from colocated_grpo.runtime.norm_kernels import inverse_rms, load_halves, rotated
from colocated_grpo.runtime.triton_jit import jit

HEAD_SIZES = (64, 128, 256)
NUMBERS_PER_WARP = 1024
Forward = Callable[..., Tensor]


class Cache(NamedTuple):
    """Destination of a layer's keys and values."""

    blocks: Tensor
    """[blocks, key-value heads, block size, 2 x head size], keys before values."""
    slots: Tensor
    """[tokens] int64: block * block size + offset in the block; -1: not stored. Padding at the end has no entry."""
    scales: tuple[Tensor, Tensor] | None = None
    """Scales of keys and values in fp8, one number each. None: a 16-bit cache."""


def make_forward(vllm_forward: Forward, count_use: Callable[[], None]) -> Forward:
    """Return the attention module's `forward` with this kernel. Install before CUDA graphs are captured."""

    def forward(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
        cache = _cache_of(self.attn, hidden_states.dtype) if suits(self, positions, hidden_states) else None
        if cache is None:
            return vllm_forward(self, positions, hidden_states)
        count_use()
        qkv, _ = self.qkv_proj(hidden_states)
        normalize_rotate_and_store(self, qkv, positions, cache)
        # Without keys and values, vLLM's attention layer assumes that the cache is written.
        output, _ = self.o_proj(self.attn(qkv[:, : self.q_size], None, None))
        return output

    return forward


def suits(attention: Any, positions: Tensor, hidden: Tensor) -> bool:
    """True for 16-bit models with plain neox-style rotary embeddings over the whole head."""
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
    """Return the layer's cache; None if its layout is not supported, or if the cache is not allocated yet."""
    owns_one = layer.attn_type == AttentionType.DECODER and layer.kv_sharing_target_layer_name is None
    if type(layer.impl) is not FlashAttentionImpl or layer.impl.dcp_world_size > 1 or not owns_one:
        return None
    _, _, blocks, slots = get_attention_context(layer.layer_name)
    quantized = layer.kv_cache_dtype in ("fp8", "fp8_e4m3")
    is_plain = (
        slots is not None
        and blocks.dtype == (torch.uint8 if quantized else dtype)
        and blocks.dim() == 4
        and blocks.shape[1] == layer.num_kv_heads
        and blocks.shape[3] == 2 * layer.head_size
        and blocks.stride(3) == 1
    )
    if not is_plain:
        return None
    return Cache(blocks.view(FP8), slots, (layer._k_scale, layer._v_scale)) if quantized else Cache(blocks, slots)


def normalize_rotate_and_store(attention: Any, qkv: Tensor, positions: Tensor, cache: Cache) -> None:
    """Normalise and rotate queries in place; write normalised, rotated keys and plain values into the cache.

    qkv: [T, (query heads + 2 x key-value heads) x head size].
    """
    rotary, size = attention.rotary_emb, attention.head_dim
    rows = triton.next_power_of_2(attention.num_heads + 2 * attention.num_kv_heads)
    _prepare[(len(qkv),)](
        qkv, cache.blocks, cache.slots, len(cache.slots), positions,
        attention.q_norm.weight, attention.k_norm.weight, rotary._match_cos_sin_cache_dtype(qkv),
        *(cache.scales or (qkv, qkv)), attention.q_norm.variance_epsilon, qkv.stride(0), *cache.blocks.stride()[:3],
        QUERIES=attention.num_heads, KEYS=attention.num_kv_heads, ROWS=rows, SIZE=size, BLOCK=cache.blocks.shape[2],
        QUANTIZED=cache.scales is not None,
        num_warps=max(1, min(16, rows * size // NUMBERS_PER_WARP)),
    )  # fmt: skip


@jit
def _prepare(
    qkv, blocks, slots, num_slots, positions, query_weight, key_weight, cos_sin, key_scale, value_scale,
    epsilon, token_stride, block_stride, head_stride, place_stride,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = SIZE // 2
    dtype = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)[:, None]  # heads: queries, keys, values
    column = tl.arange(0, HALF)[None, :]
    is_query = row < QUERIES
    is_value = row >= QUERIES + KEYS
    real = row < QUERIES + 2 * KEYS
    at = qkv + token * token_stride + row * SIZE + column
    left, right = load_halves(at, HALF, real)

    scale = inverse_rms(left, right, epsilon, SIZE)
    weight_left = tl.where(is_query, tl.load(query_weight + column), tl.load(key_weight + column))
    weight_right = tl.where(is_query, tl.load(query_weight + HALF + column), tl.load(key_weight + HALF + column))
    x = (left * scale * weight_left.to(tl.float32)).to(dtype).to(tl.float32)
    y = (right * scale * weight_right.to(tl.float32)).to(dtype).to(tl.float32)

    cos, sin = load_halves(cos_sin + tl.load(positions + token) * SIZE + column, HALF, column < HALF)
    x, y = rotated(x, y, cos, sin)
    left, right = tl.where(is_value, left, x).to(dtype), tl.where(is_value, right, y).to(dtype)
    tl.store(at, left, mask=is_query)
    tl.store(at + HALF, right, mask=is_query)

    if QUANTIZED:
        cache_scale = tl.where(is_value, tl.load(value_scale), tl.load(key_scale))
        left = left.to(tl.float32) / cache_scale
        right = right.to(tl.float32) / cache_scale
    slot = tl.load(slots + token, mask=token < num_slots, other=-1)
    if slot >= 0:
        head = tl.where(is_value, row - QUERIES - KEYS, row - QUERIES)
        to = blocks + slot // BLOCK * block_stride + head * head_stride + slot % BLOCK * place_stride + column
        to += tl.where(is_value, SIZE, 0)
        stored = real & (row >= QUERIES)
        tl.store(to, left, mask=stored)
        tl.store(to + HALF, right, mask=stored)
