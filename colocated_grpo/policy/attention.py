"""Causal attention over packed sequences: a token sees only itself and earlier tokens of its own sequence.

Registered with transformers as attention implementations, one for each set of kernels. Models built with these
implementations need no mask.

Shapes: T packed tokens, U tokens of common prefixes (the first U of T), E keys that the queries see (T without common
prefixes), R largest number of sequences with one common prefix, N runs of consecutive queries, H query heads,
K key-value heads, D head size.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from colocated_grpo.batching import PackedTokens, PrefixKeys
from colocated_grpo.policy.attention_kernels import (
    MIN_RUN_FOR_FA4,
    Attend,
    Runs,
    attend_fa4,
    attend_padded,
    attend_varlen,
    attend_with_sinks,
    has_fa4,
)
from colocated_grpo.policy.context_parallel import heads_to_rows, own_heads, rows_to_heads
from colocated_grpo.policy.softcap import Capped, attend_capped
from colocated_grpo.settings.config_json import attention_heads
from colocated_grpo.settings.model_support import caps_attention, has_sinks, head_sizes

PACKED = "packed"
PACKED_FA4 = "packed_fa4"


def implementation_for(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, *, longest: int, context_parallel: int = 1
) -> str:
    """Return the registered name of the fastest implementation for the model on this device.

    longest: tokens of the longest possible sequence. Below MIN_RUN_FOR_FA4, FlashAttention 4 is not even compiled.
    context_parallel: ranks over which the heads are split.
    """
    text = config.get_text_config().to_dict()
    if longest < MIN_RUN_FOR_FA4 or has_sinks(text) or caps_attention(text):
        return PACKED
    heads = attention_heads(text)
    kv_heads = text.get("num_key_value_heads") or heads
    sizes = head_sizes(text)
    if not (isinstance(heads, int) and isinstance(kv_heads, int) and len(sizes) == 1):
        return PACKED
    own = heads // context_parallel, max(1, kv_heads // context_parallel)
    return PACKED_FA4 if has_fa4(*own, sizes.pop(), dtype, device) else PACKED


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    prefix_keys: PrefixKeys | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    capped: Capped | None = None,
    context_group: str | None = None,
    on_cuda: Attend = attend_varlen,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend over packed sequences. The signature is that of transformers' attention functions.

    query: [1, H, T, D], key and value: [1, K, T, D], cu_seq_lens_q: [N + 1] int32. Returns [1, T, H, D].
    prefix_keys: set if the micro-batch has common prefixes. None: each run sees only its own keys. The last query of a
    run sees all of the run's keys. softcap: largest score. s_aux: [H] attention sinks. capped: needed for softcap in 16
    bit on a GPU. context_group: name of the process group over which the micro-batch is split; T then counts this
    rank's rows, while cu_seq_lens_q and prefix_keys index the rows of all ranks of the group.
    """
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if context_group is not None:
        query, key, value = rows_to_heads(query, key, value, context_group)
        s_aux = None if s_aux is None else own_heads(s_aux, context_group)
    if prefix_keys is None:
        runs = Runs(cu_seq_lens_q, max_length_q, cu_seq_lens_q, max_length_q)
    else:
        key, value = (expand_keys(tensor, prefix_keys) for tensor in (key, value))
        runs = Runs(cu_seq_lens_q, max_length_q, prefix_keys.cu_seqlens, prefix_keys.max_seqlen)
    if not (query.is_cuda and query.dtype.itemsize == 2):  # FlashAttention has no float32 kernels
        attend: Attend = partial(attend_padded, sinks_H=s_aux, softcap=softcap)
    elif softcap is not None:
        assert s_aux is None  # no model family has both sinks and soft-capped scores
        assert capped is not None
        attend = lambda q, k, v, _, scale, window: attend_capped(q, k, v, capped, scale, window)  # noqa: E731
    elif s_aux is not None:
        attend = partial(attend_with_sinks, sinks_H=s_aux)
    else:
        attend = on_cuda
    out = attend(query, key, value, runs, scaling, sliding_window)
    return (out if context_group is None else heads_to_rows(out, context_group))[None], None


def with_own_keys(tokens: PackedTokens) -> PackedTokens:
    """Return tokens with `prefix_keys` set. If they were None, each run sees only its own keys.

    All micro-batches then run one compiled graph. Results are bit-identical, at the cost of copying keys and values.
    """
    if tokens.prefix_keys is not None:
        return tokens
    rows_T = torch.arange(tokens.num_rows, device=tokens.cu_seqlens.device)
    # Use clones and a [2, 2] tensor, because torch.compile specializes on repeated tensor objects and on sizes of 0 and
    # 1.
    no_copies_22 = rows_T.new_full((2, 2), -1)
    keys = PrefixKeys(rows_T, rows_T.clone(), no_copies_22, tokens.cu_seqlens.clone(), tokens.max_seqlen)
    return replace(tokens, prefix_keys=keys)


def expand_keys(keys_TKD: Tensor, prefix_keys: PrefixKeys) -> Tensor:
    """Return keys, or values, [E, K, D] with a copy of the prefix for each sequence."""
    return _ExpandKeys.apply(keys_TKD, prefix_keys.rows_E, prefix_keys.keys_of_T, prefix_keys.copies_UR)


class _ExpandKeys(torch.autograd.Function):
    """Gather rows; backward adds the gradients of all copies of a row in float32 and in a fixed order.

    The backward of plain indexing uses atomic additions, whose order changes the bits of the result.
    """

    @staticmethod
    def forward(ctx: Any, keys_TKD: Tensor, rows_E: Tensor, keys_of_T: Tensor, copies_UR: Tensor) -> Tensor:
        ctx.save_for_backward(keys_of_T, copies_UR)
        return keys_TKD[rows_E]

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad_EKD: Tensor) -> tuple[Tensor | None, ...]:
        keys_of_T, copies_UR = ctx.saved_tensors
        own_TKD, num_prefix_rows = grad_EKD[keys_of_T], len(copies_UR)
        exact = torch.promote_types(grad_EKD.dtype, torch.float32)
        copies_URKD = torch.where((copies_UR >= 0)[:, :, None, None], grad_EKD[copies_UR.clamp(min=0)], 0)
        prefix_UKD = own_TKD[:num_prefix_rows].to(exact) + copies_URKD.sum(1, dtype=exact)
        return torch.cat([prefix_UKD.to(own_TKD.dtype), own_TKD[num_prefix_rows:]]), None, None, None


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(PACKED_FA4, partial(packed_attention, on_cuda=attend_fa4))
