"""FlashAttention 4 over packed sequences, as a custom operator that is opaque to torch.compile.

On Hopper GPUs, FlashAttention 4 takes 0.7 x the time of torch's FlashAttention 2 for sequences of 512 tokens, and 0.5 x
for long sequences: docs/results/attention_1xh200.json. The kernels are bundled with vLLM. The first call compiles them,
which takes seconds. For short runs, the operator itself calls FlashAttention 2: a choice outside of the operator would
compile each block twice.

Shapes: T queries, E keys, N runs of queries, H query heads, K key-value heads, D head size.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colocated_grpo.policy import fa2

HOPPER = (9, 0)
HEAD_SIZES = (64, 128)


class Kernels(NamedTuple):
    """vLLM's private entry points of FlashAttention 4."""

    forward: Callable[..., tuple[Tensor | None, ...]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@cache
def kernels() -> Kernels:
    """Import the kernels. Raises ImportError if vLLM lacks them, or their compiler is not installed."""
    # nvidia-cutlass-dsl 4.6 warns once for each kernel about an argument that is not used here.
    warnings.filterwarnings("ignore", "Argument .* cannot be converted to a JitArgument", UserWarning)
    from vllm.vllm_flash_attn.cute import interface

    return Kernels(interface._flash_attn_fwd, interface._flash_attn_bwd)


@torch.library.custom_op("colocated_grpo::packed_fa4", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    min_run: int,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of each run's queries to its keys; the last query of a run sees all its keys.

    query: [T, H, D], key and value: [E, K, D], 16-bit; cu_q, cu_k: [N + 1] int32. min_run: smallest mean number of
    queries per run for FlashAttention 4. Returns [T, H, D] and the logsumexps [H, T] in float32. The logsumexps have no
    gradient.
    """
    if _are_short(query, cu_q, min_run):
        out, logsumexp = fa2.forward(query, key, value, (cu_q, cu_k, longest_q, longest_k), scale, -1)
        return out.contiguous(), logsumexp
    out, logsumexp, *_ = kernels().forward(
        query, key, value, **_settings(cu_q, cu_k, longest_q, longest_k, scale), return_lse=True
    )
    assert out is not None and logsumexp is not None
    return out, logsumexp


@attend.register_fake
def _(query, key, value, cu_q, cu_k, longest_q, longest_k, scale, min_run):
    tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("colocated_grpo::packed_fa4_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    min_run: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value; grad and out: [T, H, D]. min_run: as in `attend`."""
    if _are_short(query, cu_q, min_run):
        runs = cu_q, cu_k, longest_q, longest_k
        dq, dk, dv = fa2.backward(grad, query, key, value, out, logsumexp, runs, scale, -1)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    return kernels().backward(
        query,
        key,
        value,
        out,
        grad,
        logsumexp,
        **_settings(cu_q, cu_k, longest_q, longest_k, scale),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        # By default, FlashAttention 2 and 4 lay out gradients like the inputs. The fake below declares contiguous
        # gradients.
        dq=query.new_empty(query.shape),
        dk=key.new_empty(key.shape),
        dv=value.new_empty(value.shape),
    )


@attend_backward.register_fake
def _(grad, query, key, value, out, logsumexp, cu_q, cu_k, longest_q, longest_k, scale, min_run):
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _are_short(query: Tensor, cu_q: Tensor, min_run: int) -> bool:
    return len(query) < min_run * (len(cu_q) - 1)


def _settings(cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int, scale: float) -> dict[str, object]:
    """Return the arguments common to both kernels."""
    return {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
        "softmax_scale": scale,
        "causal": True,
    }


def _save_for_backward(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_q, cu_k, *ctx.sizes = inputs
    ctx.save_for_backward(query, key, value, *output, cu_q, cu_k)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *attend_backward(grad, *ctx.saved_tensors, *ctx.sizes), None, None, None, None, None, None


attend.register_autograd(_backward, setup_context=_save_for_backward)
