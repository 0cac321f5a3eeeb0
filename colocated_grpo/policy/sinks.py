"""Attention sinks for kernels that lack them, as a custom operator that is opaque to torch.compile.

A sink is one more score per head, in addition to the scores of the keys. The sink enters the softmax but has no value,
so the sink only shrinks the output: with logsumexp L of the keys' scores and sink s, L' = log(exp L + exp s), out' =
out * exp(L - L'). FlashAttention's backward kernels compute weights as exp(score - L), and the gradients of scores from
sum(grad * out). If these kernels get L' and out' in place of L and out, they compute the exact gradients with a sink.
The sink's own gradient is
-sum(exp(s - L') * sum(grad * out')).

Shapes: T queries, E keys, N runs of queries, H query heads, K key-value heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor

from colocated_grpo.policy import fa2


def add_sinks(out_THD: Tensor, logsumexp_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """Shrink `out_THD` in place by the sinks' weight. Returns the logsumexps with sinks."""
    with_sinks_HT = torch.logaddexp(logsumexp_HT, sinks_H[:, None].to(logsumexp_HT.dtype))
    out_THD.mul_((logsumexp_HT - with_sinks_HT).exp().T[:, :, None])
    return with_sinks_HT


def sinks_gradient(grad_THD: Tensor, out_THD: Tensor, logsumexp_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of the sinks. out_THD, logsumexp_HT: results with sinks."""
    weights_HT = (sinks_H[:, None].to(logsumexp_HT.dtype) - logsumexp_HT).exp()
    products_TH = (grad_THD.to(logsumexp_HT.dtype) * out_THD).sum(-1)
    return -(weights_HT * products_TH.T).sum(1).to(sinks_H.dtype)


@torch.library.custom_op("colocated_grpo::packed_sinks", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float | None,
    left: int,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of each run's queries to its keys with FlashAttention 2.

    query: [T, H, D], key and value: [E, K, D], 16-bit; sinks: [H]; cu_q, cu_k: [N + 1] int32. left: number of earlier
    keys that a query sees, -1 for all; the last query of a run is at the position of the run's last key. Returns [T, H,
    D] and the logsumexps [H, T] in float32, which have no gradient.
    """
    out, logsumexp = fa2.forward(query, key, value, (cu_q, cu_k, longest_q, longest_k), scale, left)
    return out, add_sinks(out, logsumexp, sinks)


@attend.register_fake
def _(query, key, value, sinks, cu_q, cu_k, longest_q, longest_k, scale, left):
    tokens, heads, _ = query.shape
    return torch.empty_like(query), query.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("colocated_grpo::packed_sinks_backward", mutates_args=())
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
    scale: float | None,
    left: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value; grad and out: [T, H, D]."""
    runs = cu_q, cu_k, longest_q, longest_k
    return fa2.backward(grad, query, key, value, out, logsumexp, runs, scale, left)


@attend_backward.register_fake
def _(grad, query, key, value, out, logsumexp, cu_q, cu_k, longest_q, longest_k, scale, left):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save_for_backward(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, cu_q, cu_k, *ctx.sizes = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, cu_q, cu_k)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, sinks, out, logsumexp, cu_q, cu_k = ctx.saved_tensors
    gradients = attend_backward(grad, query, key, value, out, logsumexp, cu_q, cu_k, *ctx.sizes)
    return *gradients, sinks_gradient(grad, out, logsumexp, sinks), None, None, None, None, None, None


attend.register_autograd(_backward, setup_context=_save_for_backward)
