"""Causal attention of runs of queries to runs of keys: one function per kernel.

Each function takes query [T, H, D], key and value [E, K, D] and returns [T, H, D]. `attend_varlen` and `attend_padded`
also take values [E, K, V] with smaller heads, and return [T, H, V]. The last query of a run sees all keys of the run.

Shapes: T queries, E keys, N runs of consecutive queries, L queries of the longest run, M keys of the run with the most
keys, H query heads, K key-value heads, D head size, V head size of values.
"""

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from colocated_grpo.errors import in_one_line
from colocated_grpo.policy import flash_attention
from colocated_grpo.policy.flash_attention import FA4_HEAD_SIZES, NEVER, Runs

MIN_RUN_FOR_FA4 = 192
"""Smallest mean number of queries per run for FlashAttention 4. It processes tiles of 128 queries, full or not, and is
slower than FlashAttention 2 on shorter runs: docs/results/attention_1xh200.json."""
MAX_VARLEN_HEAD = 256
"""Largest head that FlashAttention 2 supports; Gemma 4 has heads of 512 in its layers without a window."""
MAX_BF16_DIFFERENCE = 2**-6
"""Largest relative difference between two kernels' outputs or gradients that bfloat16 rounding explains."""


Attend = Callable[[Tensor, Tensor, Tensor, Runs, float | None, int | None], Tensor]
"""(query, key, value, runs, scale of the scores or None for 1 / sqrt(D), sliding window in tokens) -> output."""


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Runs,
    scaling: float | None,
    window: int | None,
    *,
    sinks_H: Tensor | None = None,
    min_run: int = NEVER,
) -> Tensor:
    """Attend with FlashAttention 2, or over padded runs if it has no kernel for the head size.

    sinks_H: one score per head that enters the softmax but has no value. min_run: smallest mean number of queries per
    run for FlashAttention 4, where it supports the layer and `has_fa4`.
    """
    if query.shape[-1] > MAX_VARLEN_HEAD:
        return attend_padded(query, key, value, runs, scaling, window, sinks_H=sinks_H)
    size = value.shape[-1]
    if not (window is None and sinks_H is None and size == query.shape[-1] and size in FA4_HEAD_SIZES):
        min_run = NEVER
    if size < query.shape[-1]:  # the kernel needs equal head sizes
        value = F.pad(value, (0, query.shape[-1] - size))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    left = -1 if window is None else window - 1  # a window includes the query's own key
    return flash_attention.packed_flash(query, key, value, sinks_H, *runs, scale, left, min_run)[0][..., :size]


attend_fa4 = partial(attend_varlen, min_run=MIN_RUN_FOR_FA4)


@cache
def has_fa4(heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if FlashAttention 4 runs here for these heads and agrees with torch's kernel.

    The first call takes seconds: it compiles FlashAttention 4 and compares both kernels on random inputs.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != flash_attention.HOPPER:
        return False
    if size not in flash_attention.FA4_HEAD_SIZES or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        difference = _fa4_difference(heads, kv_heads, size, dtype, device)
    # The compiler of FlashAttention 4 may raise any error, and training works without this kernel.
    except Exception as error:
        reason = in_one_line(error)
    else:
        if difference < MAX_BF16_DIFFERENCE:
            return True
        reason = f"it differs from FlashAttention 2 by {difference:.1e}"
    logging.getLogger(__name__).warning("training with FlashAttention 2 instead of the faster 4: %s", reason)
    return False


def _fa4_difference(heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest relative difference between `attend_fa4` and torch's kernel, in outputs and gradients.

    Compares both branches of `attend_fa4`, for long and for short runs. The inputs are two random runs, one of which
    has prefix keys.
    """
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in ([0, 200, 500], [0, 200, 600]))
    runs = Runs(cu_q, cu_k, 300, 400)
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(500, heads, size), (600, kv_heads, size), (600, kv_heads, size), (500, heads, size)]
    query, key, value, grad = (torch.randn(shape, dtype=dtype, device=device, generator=generator) for shape in shapes)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]

    def results(attend: Attend) -> list[Tensor]:
        out = attend(query, key, value, runs, None, None)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    expected = results(attend_varlen)
    found = [results(partial(attend_fa4, min_run=min_run)) for min_run in (0, len(query))]
    pairs = [pair for some in found for pair in zip(some, expected, strict=True)]
    # torch's maximum: Python's would ignore a NaN.
    return torch.stack([(a.float() - b.float()).norm() / b.float().norm() for a, b in pairs]).max().item()


def attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Runs,
    scaling: float | None,
    window: int | None,
    *,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend over padded runs. Padding comes after all real keys, so the causal mask hides it.

    A CPU attends to one run after the other: padding takes longer than these calls. A graph cannot read the lengths.
    """
    if not (query.is_cuda or len(runs.cu_q) == 2 or torch.compiler.is_compiling()):
        lengths_q, lengths_k = (cu.diff().tolist() for cu in (runs.cu_q, runs.cu_k))
        parts = zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True)
        attend = partial(attend_padded, scaling=scaling, window=window, sinks_H=sinks_H, softcap=softcap)
        return torch.cat([attend(q, k, v, _one_run(len(q), len(k))) for q, k, v in parts])
    query, valid_NL = padded_runs(query, runs.cu_q, runs.longest_q)
    (key, valid_NM), (value, _) = (padded_runs(tensor, runs.cu_k, runs.longest_k) for tensor in (key, value))
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    fused = sinks_H is None and softcap is None
    if fused and window is None and runs.cu_k is runs.cu_q:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        steps_L, steps_M = (torch.arange(longest, device=key.device) for longest in (runs.longest_q, runs.longest_k))
        before_N1 = (valid_NM.sum(1) - valid_NL.sum(1))[:, None]
        distance_NLM = (before_N1 + steps_L)[:, :, None] - steps_M
        mask = ((distance_NLM >= 0) & (distance_NLM < (window or runs.longest_k + 1)))[:, None]
        if fused:
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
        else:
            out = _attend_masked(query, key, value, mask, scaling, sinks_H, softcap)
    return out.transpose(1, 2)[valid_NL]


def _one_run(queries: int, keys: int) -> Runs:
    cu_q = torch.tensor([0, queries], dtype=torch.int32)
    return Runs(cu_q, cu_q if keys == queries else torch.tensor([0, keys], dtype=torch.int32), queries, keys)


def _attend_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    sinks_H: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attend with sinks or soft-capped scores, which torch lacks. query: [N, H, L, D], key, value: [N, K, M, D]."""
    exact = torch.promote_types(query.dtype, torch.float32)
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1).to(exact) for tensor in (key, value))
    scores = query.to(exact) @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # Use a finite minimum instead of -inf: a row of padding may see no key at all, and its NaN would reach the
    # gradients of all keys.
    scores = scores.masked_fill(~mask, torch.finfo(exact).min)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.to(exact)[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).to(query.dtype)


def padded_runs(packed: Tensor, cu: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return the runs of [rows, ...] as [N, longest, ...], and the mask [N, longest] of real tokens."""
    steps_L = torch.arange(longest, device=cu.device)
    if len(cu) == 2 and len(packed) == longest:
        return packed[None], steps_L[None] >= 0
    rows_NL = (cu[:-1, None] + steps_L).clamp(max=len(packed) - 1)
    return packed[rows_NL], steps_L < (cu[1:] - cu[:-1])[:, None]
