"""Operators whose rows do not depend on each other, for `numerics: exact`: matrix product and attention on CPUs in
float32, and mixtures of experts on GPUs.

With the same operators, engine and policy compute the same bits. Other operators of the CPU already compute each row
by itself; those of GPUs are in `row_kernels.py`, `norm_kernels.py` and `row_attention.py`.

Shapes: T tokens, I input features, O output features, E keys, N runs, B pages of a run, H query heads, K key-value
heads, D head size, C chosen experts, F inner features of an expert.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16
"""Rows of one matrix product: torch picks the kernel by their number."""
BLOCK = 64
"""Keys in a block of the cache. Any multiple of 32 gives the same bits."""


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return F.linear(x, weight, bias), `ROWS` rows at a time."""
    x_TI = x.reshape(-1, x.shape[-1])
    padded = F.pad(x_TI, (0, 0, 0, -len(x_TI) % ROWS))
    out_TO = torch.cat([F.linear(rows, weight_OI, bias_O) for rows in padded.split(ROWS)])
    return out_TO[: len(x_TI)].view(*x.shape[:-1], len(weight_OI))


def single_queries(cu_q: Tensor, keys_N: Tensor, table_NB: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return boundaries [T + 1], numbers of keys [T] and page tables [T, B] with which each query is a run of its own.

    cu_q: [N + 1] int32. keys_N: keys of each run, of which its last query sees all. queries: T.
    """
    query_T = torch.arange(queries + 1, dtype=torch.int32, device=cu_q.device)
    run_T = torch.searchsorted(cu_q[1:], query_T[:-1], right=True)
    later_T = cu_q[1:][run_T] - 1 - query_T[:-1]
    return query_T, (keys_N[run_T] - later_T).int(), table_NB[run_T]


def mix_experts(x_TI: Tensor, weights_TC: Tensor, experts_TC: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each row's experts, gated MLPs with SiLU, on GPUs.

    experts_TC: int32. gate_up: [experts, 2 F, I], down: [experts, I, F]. All tiles of vLLM's Triton kernels add in the
    same order, like those of `row_kernels.matmul`.
    """
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    return fused_experts(x_TI, gate_up, down, weights_TC, experts_TC)


def page_slots(cu_k: Tensor, keys: int, longest_k: int, page: int) -> tuple[Tensor, Tensor, int]:
    """Return each packed key's place in pages of `page` keys, [E] int64, the page tables [N, B], and the pages."""
    first_N = F.pad((cu_k.diff() + page - 1) // page, (1, 0)).cumsum(0, dtype=torch.int32)[:-1]
    key_E = torch.arange(keys, dtype=torch.int32, device=cu_k.device)
    run_E = torch.searchsorted(cu_k[1:], key_E, right=True)
    pages = keys // page + len(first_N)  # at least as many as are used, without waiting for the device
    table_NB = first_N[:, None] + torch.arange(-(-longest_k // page), dtype=torch.int32, device=cu_k.device)
    return (first_N[run_E] * page + key_E - cu_k[run_E]).long(), table_NB.clamp_(max=pages - 1), pages


def attend_singly(attend: Callable[..., None], **arguments: Any) -> None:
    """Call vLLM's `cpu_attention_with_kv_cache` with each query as a request of its own.

    The kernel sums over tiles of keys, whose size depends on the number of queries of a request. To split the keys
    between threads, which changes the sum too, is left out.
    """
    from vllm import _custom_ops as ops

    query_THD, cache = arguments["query"], arguments["key_cache"]
    runs = (arguments[name] for name in ("query_start_loc", "seq_lens", "block_table"))
    singles, seen_T, table_TB = single_queries(*runs, queries=len(query_THD))
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(query_THD),
        num_heads=query_THD.shape[1],
        num_kv_heads=cache.shape[1],
        head_dim=query_THD.shape[2],
        seq_lens=seen_T,
        dtype=query_THD.dtype,
        query_start_loc=singles,
        causal=True,
        sliding_window_size=arguments["sliding_window"],
        isa=_instructions(cache),
        enable_kv_split=False,
    )
    changed = {"query_start_loc": singles, "seq_lens": seen_T, "block_table": table_TB, "scheduler_metadata": metadata}
    attend(**arguments | changed)


def attend_packed(
    query_THD: Tensor, key_EKD: Tensor, value_EKD: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attend with the engine's kernel. The last query of a run sees all keys of the run. cu_q, cu_k: [N + 1] int32."""
    from vllm import _custom_ops as ops

    keys_N = cu_k.diff()
    slots_E, table_NB, blocks = page_slots(cu_k, len(key_EKD), int(keys_N.max()), BLOCK)
    cache = key_EKD.new_zeros(blocks, key_EKD.shape[1], 2 * BLOCK, key_EKD.shape[2])
    keys, values = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key_EKD, value_EKD, keys, values, slots_E, _instructions(keys))
    out = torch.empty(query_THD.shape)
    attend_singly(
        ops.cpu_attention_with_kv_cache,
        query=query_THD.contiguous(),
        key_cache=keys,
        value_cache=values,
        output=out,
        query_start_loc=cu_q,
        seq_lens=keys_N,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1 if window is None else window,
        block_table=table_NB,
        softcap=0.0,
        s_aux=None,
    )
    return out


def _instructions(key_cache: Tensor) -> str:
    """Return vLLM's name of the instruction set, which decides the cache's layout. key_cache: [blocks, K, keys, D]."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(key_cache.dtype, key_cache.shape[2], key_cache.shape[3])
