"""Causal attention of runs of queries to runs of keys, by each kernel that there is.

Each takes query [T, H, D], key and value [E, K, D] and returns [T, H, D]. N runs of consecutive queries, L longest run,
M most keys of a run; the last query of a run sees all of its keys. H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from colocated_grpo.errors import in_one_line
from colocated_grpo.policy import fa4

# torch 2.11 broadcasts key-value heads unasked and has no such argument; later releases refuse without it.
_takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
_varlen = partial(varlen_attn, enable_gqa=True) if _takes_gqa else varlen_attn

FEWEST_FOR_FA4 = 192
"""Queries of an average run. FlashAttention 4 works through 128 of them at once, however few there are; up to there it
is the slower one: docs/results/attention_1xh200.json."""
ROUNDINGS = 2**-6
"""Relative difference that bfloat16 explains between two kernels' gradients."""


class Runs(NamedTuple):
    """Where runs of consecutive queries begin and end, and the keys that each of them sees."""

    cu_q: Tensor
    longest_q: int
    cu_k: Tensor
    longest_k: int


Attend = Callable[[Tensor, Tensor, Tensor, Runs, float | None, int | None], Tensor]
"""Of query, key, value, runs, scale of the scores (None: 1 / sqrt(D)) and sliding window in tokens."""


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None, window: int | None
) -> Tensor:
    # Causal is (-1, 0); a window of w tokens includes the token itself, the kernel counts those to its left.
    left = -1 if window is None else window - 1
    borders = runs.cu_q, runs.cu_k, runs.longest_q, runs.longest_k
    return _varlen(query, key, value, *borders, scale=scaling, window_size=(left, 0))


def attend_fa4(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None, window: int | None
) -> Tensor:
    """Where `has_fa4` says so for most of a model's heads. The kernel gets what it is proven and faster for."""
    proven = window is None and query.shape[-1] == value.shape[-1] and query.shape[-1] in fa4.HEAD_SIZES
    if not proven or len(query) < FEWEST_FOR_FA4 * (len(runs.cu_q) - 1):
        return attend_varlen(query, key, value, runs, scaling, window)
    return whole_fa4(query, key, value, runs, scaling)


def whole_fa4(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None, window: None = None
) -> Tensor:
    """The kernel itself, for runs of any length."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return fa4.attend(query, key, value, runs.cu_q, runs.cu_k, runs.longest_q, runs.longest_k, scale)[0]


@cache
def has_fa4(heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether FlashAttention 4 runs here for such heads, and as torch's kernels do. The first time compiles it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != fa4.HOPPER:
        return False
    if size not in fa4.HEAD_SIZES or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        difference = _fa4_difference(heads, kv_heads, size, dtype, device)
    except Exception as error:  # another package's compiler: it raises whatever it likes, and training can do without
        reason = in_one_line(error)
    else:
        if difference < ROUNDINGS:
            return True
        reason = f"it differs from FlashAttention 2 by {difference:.1e}"
    logging.getLogger(__name__).warning("training without FlashAttention 4, which would be faster: %s", reason)
    return False


def _fa4_difference(heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> float:
    """The largest relative difference in output and gradients on two made-up runs, one with keys of its own only."""
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in ([0, 200, 500], [0, 200, 600]))
    runs = Runs(cu_q, 300, cu_k, 400)
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(500, heads, size), (600, kv_heads, size), (600, kv_heads, size), (500, heads, size)]
    *inputs, grad = (torch.randn(shape, dtype=dtype, device=device, generator=generator) for shape in shapes)
    for tensor in inputs:
        tensor.requires_grad_()

    def results(attend: Attend) -> list[Tensor]:
        out = attend(*inputs, runs, None, None)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    pairs = zip(results(whole_fa4), results(attend_varlen), strict=True)
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


def attend_padded(
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
