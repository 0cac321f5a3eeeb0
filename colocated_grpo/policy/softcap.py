"""Attention with soft-capped scores over packed sequences, by torch's FlexAttention on CUDA devices.

A query sees an interval of keys: from the first key of its run, or of its window, to its own key. A block mask with two
numbers per query therefore covers all runs and windows with one compiled kernel.

Shapes: T queries, E keys, Q blocks of queries, K blocks of keys, B queries of a block; in `attend_capped` H heads of
queries, K of keys and values, D head size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import PretrainedConfig

from colocated_grpo.batching import PackedTokens
from colocated_grpo.policy.attention_kernels import Runs

BLOCK = 128
"""Queries, and keys, of one block. The kernel skips blocks of keys that no query of a block sees."""

_flex_attention = torch.compile(flex_attention, dynamic=True)


@dataclass(eq=False)
class Capped:
    """Inputs of all layers' attention in one micro-batch. A dataclass: FSDP would cast a tuple's tensors to 16 bits."""

    softcap: Tensor
    """[] float32. A Python number would become an input of the compiled function, and FlexAttention's lowering rejects
    such an input (torch 2.11 to 2.13: "unbacked_bindings")."""
    masks: dict[int | None, BlockMask]
    """One mask per window size of the layers. The key None stands for no window."""


def capped_attention(config: PretrainedConfig, tokens: PackedTokens) -> Capped | None:
    """Return what `attend_capped` needs; None if the model does not cap scores or if the tokens are not on a GPU."""
    softcap, cu_q = getattr(config, "attn_logit_softcapping", None), tokens.cu_seqlens
    if softcap is None or not cu_q.is_cuda:
        return None
    keys = tokens.prefix_keys
    cu_k, longest_k = (cu_q, tokens.max_seqlen) if keys is None else (keys.cu_seqlens, keys.max_seqlen)
    runs = Runs(cu_q, tokens.max_seqlen, cu_k, longest_k)
    num_keys = tokens.num_rows if keys is None else len(keys.rows_E)
    windows = {None, getattr(config, "sliding_window", None)}
    masks = {window: block_mask(runs, window, tokens.num_rows, num_keys) for window in windows}
    return Capped(torch.full((), softcap, device=cu_q.device), masks)


def block_mask(runs: Runs, window: int | None, num_queries: int, num_keys: int) -> BlockMask:
    """Return the mask of causal attention within runs; the last query of a run sees all keys of
    the run, or the last `window` of them.

    This takes a few dozen small operations. Build the mask once per micro-batch and window, not in each layer.
    """
    first_T, last_T = seen_keys(runs, window, num_queries)
    # Padding after the last query sees no key.
    rows, columns = _list_sizes(num_queries, num_keys)
    padding = (0, rows * BLOCK - num_queries)
    first_QB = F.pad(first_T, padding, value=num_keys).view(-1, BLOCK)
    last_QB = F.pad(last_T, padding, value=-1).view(-1, BLOCK)
    start_K = torch.arange(columns, device=first_T.device) * BLOCK
    end_K = start_K + BLOCK - 1
    # If a block of queries has two runs, neither run sees the keys between their intervals. `sees` below hides these
    # keys.
    seen_QK = (first_QB.amin(1)[:, None] <= end_K) & (last_QB.amax(1)[:, None] >= start_K)
    full_QK = (first_QB.amax(1)[:, None] <= start_K) & (last_QB.amin(1)[:, None] >= end_K)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first_T[query] <= key) & (key <= last_T[query])

    return BlockMask.from_kv_blocks(
        *_ordered(seen_QK & ~full_QK),
        *_ordered(full_QK),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(num_queries, num_keys),
    )


def seen_keys(runs: Runs, window: int | None, num_queries: int) -> tuple[Tensor, Tensor]:
    """Return the first and the last key, both [T], that each query sees."""
    query_T = torch.arange(num_queries, device=runs.cu_q.device, dtype=runs.cu_q.dtype)
    run_T = torch.searchsorted(runs.cu_q[1:], query_T, right=True)
    last_T = query_T + (runs.cu_k - runs.cu_q)[run_T + 1]
    first_T = runs.cu_k[run_T]
    return first_T if window is None else torch.maximum(first_T, last_T - window + 1), last_T


def _list_sizes(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Return the sizes of lists of blocks: large enough, odd, not 1, and different from each other.

    torch.compile specializes on sizes of 1 and on equal sizes, such as a size that equals the number of heads, and
    recompiles when such a size changes. Blocks after the last token are never visited.
    """
    rows, columns = (max(3, -(-tokens // BLOCK) | 1) for tokens in (num_queries, num_keys))
    return rows, columns + 2  # each query has a key, so there are at least as many columns as rows before this addition


def _ordered(chosen_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen blocks [1, 1, Q], and the positions of all blocks [1, 1, Q, K], chosen first."""
    order = chosen_QK.to(torch.int32).argsort(dim=1, descending=True, stable=True)
    return chosen_QK.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def attend_capped(
    query: Tensor, key: Tensor, value: Tensor, capped: Capped, scaling: float | None, window: int | None
) -> Tensor:
    """Attend with scores cap * tanh(score / cap). query: [T, H, D], key and value: [E, K, D]."""
    softcap = capped.softcap

    def cap(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    out = _flex_attention(
        query,
        key,
        value,
        score_mod=cap,
        block_mask=capped.masks[window],
        scale=scaling,
        enable_gqa=True,
        # By default, micro-batches of fewer than 128 tokens would compile a separate kernel.
        kernel_options={"BACKEND": "TRITON"},
    )
    return out[0].transpose(0, 1)
