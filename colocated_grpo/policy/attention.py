"""Causal attention over packed sequences: a token sees only itself and earlier tokens of its own sequence.

Registered with transformers as attention implementations, one for each set of kernels. Models built with these
implementations need no mask.

Soft-capped scores need torch's FlexAttention on CUDA devices. A query sees an interval of keys: from the first key of
its run, or of its window, to its own key. A block mask with two numbers per query therefore covers all runs and windows
with one compiled kernel.

Shapes: T packed tokens, E keys that the queries see (T without common prefixes), N runs of consecutive queries, H query
heads, K key-value heads, D head size; in block masks Q blocks of queries, K blocks of keys, B queries of a block.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, PretrainedConfig

from colocated_grpo.batching.micro_batch import PackedTokens, PrefixKeys
from colocated_grpo.policy import attention_kernels as kernels
from colocated_grpo.policy.context_parallel import heads_to_rows, own_heads, rows_to_heads
from colocated_grpo.settings.config_json import attention_heads
from colocated_grpo.settings.model_support import has_plain_scores, head_sizes

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
    runs = kernels.Runs(cu_q, cu_k, tokens.max_seqlen, longest_k)
    num_keys = tokens.num_rows if keys is None else len(keys.rows_E)
    windows = {None, getattr(config, "sliding_window", None)}
    masks = {window: block_mask(runs, window, tokens.num_rows, num_keys) for window in windows}
    return Capped(torch.full((), softcap, device=cu_q.device), masks)


def block_mask(runs: kernels.Runs, window: int | None, num_queries: int, num_keys: int) -> BlockMask:
    """Return the mask of causal attention within runs: a run's last query sees all its keys, or the last `window`.

    This takes a few dozen small operations. Build the mask once per micro-batch and window, not in each layer.
    """
    query_T = torch.arange(num_queries, device=runs.cu_q.device, dtype=runs.cu_q.dtype)
    run_T = torch.searchsorted(runs.cu_q[1:], query_T, right=True)
    # The first and the last key that each query sees.
    first_T, last_T = runs.cu_k[run_T], query_T + (runs.cu_k - runs.cu_q)[run_T + 1]
    if window is not None:
        first_T = torch.maximum(first_T, last_T - window + 1)
    # Padding after the last query sees no key.
    rows, columns = _list_sizes(num_queries, num_keys)
    padding = (0, rows * BLOCK - num_queries)
    first_QB = F.pad(first_T, padding, value=num_keys).view(-1, BLOCK)
    last_QB = F.pad(last_T, padding, value=-1).view(-1, BLOCK)
    start_K = torch.arange(columns, device=first_T.device) * BLOCK
    end_K = start_K + BLOCK - 1
    # If a block of queries has two runs, neither run sees the keys between their intervals. `sees` hides these keys.
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
    if longest < kernels.MIN_RUN_FOR_FA4 or not has_plain_scores(text):
        return PACKED
    heads = attention_heads(text)
    kv_heads = text.get("num_key_value_heads") or heads
    sizes = head_sizes(text)
    if not (isinstance(heads, int) and isinstance(kv_heads, int) and len(sizes) == 1):
        return PACKED
    own = heads // context_parallel, max(1, kv_heads // context_parallel)
    return PACKED_FA4 if kernels.has_fa4(*own, sizes.pop(), dtype, device) else PACKED


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
    on_cuda: kernels.Attend = kernels.attend_varlen,
    kernel: kernels.Attend | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend over packed sequences. The signature is that of transformers' attention functions.

    query: [1, H, T, D], key and value: [1, K, T, D], cu_seq_lens_q: [N + 1] int32. Returns [1, T, H, D].
    prefix_keys: set if the micro-batch has common prefixes. None: each run sees only its own keys. The last query of a
    run sees all of the run's keys. softcap: largest score. s_aux: [H] attention sinks. capped: needed for softcap in 16
    bit on a GPU. kernel: used on every device, without sinks and softcap. context_group: name of the process group
    over which the micro-batch is split; T then counts this rank's rows, while cu_seq_lens_q and prefix_keys index the
    rows of all ranks of the group.
    """
    # `tensor[0]` would make the backward pass fill a tensor with zeros and copy the gradient into it.
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if context_group is not None:
        query, key, value = rows_to_heads(query, key, value, context_group)
        s_aux = None if s_aux is None else own_heads(s_aux, context_group)
    if prefix_keys is None:
        runs = kernels.Runs(cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    else:
        key, value = (expand_keys(tensor, prefix_keys) for tensor in (key, value))
        runs = kernels.Runs(cu_seq_lens_q, prefix_keys.cu_seqlens, max_length_q, prefix_keys.max_seqlen)
    if kernel is not None:
        attend = kernel
    elif not (query.is_cuda and query.dtype.itemsize == 2):  # FlashAttention has no float32 kernels
        attend = partial(kernels.attend_padded, sinks_H=s_aux, softcap=softcap)
    elif softcap is not None:
        assert s_aux is None  # no model family has both sinks and soft-capped scores
        assert capped is not None
        attend = lambda q, k, v, _, scale, window: attend_capped(q, k, v, capped, scale, window)  # noqa: E731
    elif s_aux is not None:
        attend = partial(kernels.attend_varlen, sinks_H=s_aux)
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
    # Use clones, because torch.compile specializes on repeated tensor objects.
    copies = rows_T.clone(), torch.arange(len(rows_T) + 1, device=rows_T.device), tokens.cu_seqlens.clone()
    return replace(tokens, prefix_keys=PrefixKeys(rows_T, *copies, tokens.max_seqlen))


def expand_keys(keys_TKD: Tensor, prefix_keys: PrefixKeys) -> Tensor:
    """Return keys, or values, [E, K, D] with a copy of the prefix for each sequence."""
    return _ExpandKeys.apply(keys_TKD, prefix_keys.rows_E, prefix_keys.keys_E, prefix_keys.starts_E)


class _ExpandKeys(torch.autograd.Function):
    """Gather rows; backward adds the gradients of all keys of a row in float32 and in a fixed order.

    The backward of plain indexing uses atomic additions, whose order changes the bits of the result.
    """

    @staticmethod
    def forward(ctx: Any, keys_TKD: Tensor, rows_E: Tensor, keys_E: Tensor, starts_E: Tensor) -> Tensor:
        ctx.save_for_backward(keys_E, starts_E)
        ctx.rows = len(keys_TKD)
        return keys_TKD[rows_E]

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad_EKD: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_keys(grad_EKD, *ctx.saved_tensors, ctx.rows), None, None, None


@torch.library.custom_op("colocated_grpo::sum_keys", mutates_args=())
def _sum_keys(grad_EKD: Tensor, keys_E: Tensor, starts_E: Tensor, rows: int) -> Tensor:
    """`row_kernels.sum_keys` on every device, as an operator that is opaque to torch.compile."""
    if grad_EKD.is_cuda:
        from colocated_grpo.runtime import row_kernels  # CPU builds of torch may lack Triton

        return row_kernels.sum_keys(grad_EKD, keys_E, starts_E, rows)
    bounds = starts_E[: rows + 1]
    sums = F.embedding_bag(keys_E, grad_EKD.flatten(1), bounds, mode="sum", include_last_offset=True)
    return sums.view(rows, *grad_EKD.shape[1:])


@_sum_keys.register_fake
def _(grad_EKD, keys_E, starts_E, rows):
    return grad_EKD.new_empty(rows, *grad_EKD.shape[1:])


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(PACKED_FA4, partial(packed_attention, on_cuda=kernels.attend_fa4))
