"""Attention over packed sequences: token t sees only the tokens before it in its own sequence.

Registered with transformers as attention implementation "packed"; models built with it need no mask.
Shapes: T packed tokens, E keys that they see (T where no beginning is shared), U tokens of shared beginnings, R readers
of the most read one, N runs of consecutive queries, L longest run, M most keys of a run, H query heads, K key-value
heads, D head size.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from colocated_grpo.batching import SharedKeys
from colocated_grpo.config.errors import ConfigError

IMPLEMENTATION = "packed"

# torch 2.11 broadcasts key-value heads unasked and has no such argument; later releases refuse without it.
_takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
_varlen = partial(varlen_attn, enable_gqa=True) if _takes_gqa else varlen_attn


class Runs(NamedTuple):
    """Where runs of consecutive queries begin and end, and the keys that each of them sees."""

    cu_q: Tensor
    longest_q: int
    cu_k: Tensor
    longest_k: int


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    shared_keys: SharedKeys | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query: [1, H, T, D], key and value: [1, K, T, D], cu_seq_lens_q: [N + 1] int32. Returns [1, T, H, D].

    shared_keys: of a micro-batch; None: the keys of a run are its own tokens'. Its last query sees all of them.
    """
    if softcap is not None:
        raise ConfigError("attention logit soft-capping (gemma2) is not supported by packed attention")
    if s_aux is not None:
        raise ConfigError("attention sinks (gpt_oss) are not supported by packed attention")
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if shared_keys is None:
        runs = Runs(cu_seq_lens_q, max_length_q, cu_seq_lens_q, max_length_q)
    else:
        key, value = (copied(tensor, shared_keys) for tensor in (key, value))
        runs = Runs(cu_seq_lens_q, max_length_q, shared_keys.cu_seqlens, shared_keys.max_seqlen)
    attend = _attend_varlen if query.is_cuda else _attend_padded
    return attend(query, key, value, runs, scaling, sliding_window)[None], None


def copied(keys_TKD: Tensor, shared: SharedKeys) -> Tensor:
    """[E, K, D]: keys, or values, of the rows in `shared.rows_E`."""
    return CopiedKeys.apply(keys_TKD, shared.rows_E, shared.keys_of_T, shared.copies_UR)


class CopiedKeys(torch.autograd.Function):
    """Backwards, each copy's gradient goes to its row: summed in float32, and not by atomic additions in whatever order
    they come, so that gradients repeat bit for bit."""

    @staticmethod
    def forward(ctx, keys_TKD: Tensor, rows_E: Tensor, keys_of_T: Tensor, copies_UR: Tensor) -> Tensor:
        ctx.save_for_backward(keys_of_T, copies_UR)
        return keys_TKD[rows_E]

    @staticmethod
    def backward(ctx, grad_EKD: Tensor) -> tuple[Tensor | None, ...]:
        keys_of_T, copies_UR = ctx.saved_tensors
        own_TKD, shared = grad_EKD[keys_of_T], len(copies_UR)
        exact = torch.promote_types(grad_EKD.dtype, torch.float32)
        copies_URKD = torch.where((copies_UR >= 0)[:, :, None, None], grad_EKD[copies_UR.clamp(min=0)], 0)
        shared_UKD = own_TKD[:shared].to(exact) + copies_URKD.sum(1, dtype=exact)
        return torch.cat([shared_UKD.to(own_TKD.dtype), own_TKD[shared:]]), None, None, None


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None, window: int | None
) -> Tensor:
    # Causal is (-1, 0); a window of w tokens includes the token itself, the kernel counts those to its left.
    left = -1 if window is None else window - 1
    borders = runs.cu_q, runs.cu_k, runs.longest_q, runs.longest_k
    return _varlen(query, key, value, *borders, scale=scaling, window_size=(left, 0))


def _attend_padded(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None, window: int | None
) -> Tensor:
    """Exact on any device. Padding on the right: it comes after every real key, so a causal mask already hides it."""
    query, valid_NL = _padded(query, runs.cu_q, runs.longest_q)
    (key, valid_NM), (value, _) = (_padded(tensor, runs.cu_k, runs.longest_k) for tensor in (key, value))
    if window is None and runs.cu_k is runs.cu_q:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        steps_L, steps_M = (torch.arange(longest, device=key.device) for longest in (runs.longest_q, runs.longest_k))
        before_N1 = (valid_NM.sum(1) - valid_NL.sum(1))[:, None]
        distance_NLM = (before_N1 + steps_L)[:, :, None] - steps_M
        mask = ((distance_NLM >= 0) & (distance_NLM < (window or runs.longest_k + 1)))[:, None]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)[valid_NL]


def _padded(packed: Tensor, cu: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """[N, heads, longest, D] of the runs of [rows, heads, D], and which of their tokens are real."""
    steps_L = torch.arange(longest, device=cu.device)
    rows_NL = (cu[:-1, None] + steps_L).clamp(max=len(packed) - 1)
    return packed[rows_NL].transpose(1, 2), steps_L < (cu[1:] - cu[:-1])[:, None]


AttentionInterface.register(IMPLEMENTATION, packed_attention)
