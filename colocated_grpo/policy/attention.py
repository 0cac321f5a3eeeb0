"""Attention over packed sequences: token t sees only the tokens before it in its own sequence.

Registered with transformers as attention implementation "packed"; models built with it need no mask.
Shapes: T packed tokens, N sequences, L longest sequence, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import inspect
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from colocated_grpo.config.errors import ConfigError

IMPLEMENTATION = "packed"

# torch 2.11 broadcasts key-value heads unasked and has no such argument; later releases refuse without it.
_takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
_varlen = partial(varlen_attn, enable_gqa=True) if _takes_gqa else varlen_attn


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query: [1, H, T, D], key and value: [1, K, T, D], cu_seq_lens_q: [N + 1] int32. Returns [1, T, H, D]."""
    if softcap is not None:
        raise ConfigError("attention logit soft-capping (gemma2) is not supported by packed attention")
    attend = _attend_varlen if query.is_cuda else _attend_padded
    return attend(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window), None


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    # Causal is (-1, 0); a window of w tokens includes the token itself, the kernel counts those to its left.
    left = -1 if window is None else window - 1
    return _varlen(*packed, cu, cu, longest, longest, scale=scaling, window_size=(left, 0))[None]


def _attend_padded(
    query: Tensor, key: Tensor, value: Tensor, cu: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """Exact on any device: right padding comes after every real token, so a causal mask already hides it."""
    steps_L = torch.arange(longest, device=cu.device)
    valid_NL = steps_L < (cu[1:] - cu[:-1])[:, None]
    rows_NL = (cu[:-1, None] + steps_L).clamp(max=query.shape[2] - 1)
    padded = [tensor[0][:, rows_NL].transpose(0, 1) for tensor in (query, key, value)]
    if window is None:
        out = F.scaled_dot_product_attention(*padded, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        distance_LL = steps_L[:, None] - steps_L
        visible_LL = (distance_LL >= 0) & (distance_LL < window)
        out = F.scaled_dot_product_attention(*padded, attn_mask=visible_LL, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)[valid_NL][None]


AttentionInterface.register(IMPLEMENTATION, packed_attention)
