"""Triton kernels between the two matrix products of the log-probability operator: each reads the logits once.

One program handles one row (token) or one block of a row. Logits are float32 [C, V] with contiguous rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def row_statistics(logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), entropy and log-sum-exp of logits / temperature, each [C] float32."""
    rows, vocabulary = logits_CV.shape
    outputs = torch.empty(3, rows, dtype=torch.float32, device=logits_CV.device)
    _row_statistics[(rows,)](
        logits_CV,
        targets_C,
        temperature_C,
        *outputs.unbind(0),
        vocabulary,
        logits_CV.stride(0),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return outputs[0], outputs[1], outputs[2]


def logit_gradient(
    logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor, logsumexp_C: Tensor, grad_C: Tensor, dtype: torch.dtype
) -> Tensor:
    """Gradient of sum(grad * log p(target)) with respect to the logits, [C, V] in `dtype`."""
    rows, vocabulary = logits_CV.shape
    out_CV = torch.empty(rows, vocabulary, dtype=dtype, device=logits_CV.device)
    _logit_gradient[(rows, triton.cdiv(vocabulary, BLOCK))](
        logits_CV,
        targets_C,
        temperature_C,
        logsumexp_C,
        grad_C,
        out_CV,
        vocabulary,
        logits_CV.stride(0),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out_CV


@triton.jit
def _row_statistics(
    logits, targets, temperatures, logprobs, entropies, logsumexps, vocabulary, stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    scale = 1.0 / tl.load(temperatures + row)
    # Every lane keeps its own running maximum and sums; lanes meet once, at the end.
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + lanes < vocabulary
        x = tl.load(logits + start + lanes, mask=inside, other=0.0) * scale
        new_top = tl.where(inside, tl.maximum(top, x), top)
        shrink = tl.where(top == new_top, 1.0, tl.exp(top - new_top))
        p = tl.where(inside, tl.exp(x - new_top), 0.0)
        mass = mass * shrink + p
        weighted = weighted * shrink + p * x
        top = new_top
    peak = tl.max(top, 0)
    shrink = tl.exp(top - peak)
    total = tl.sum(mass * shrink, 0)
    logsumexp = peak + tl.log(total)
    target = tl.load(logits + tl.load(targets + row)) * scale
    tl.store(logprobs + row, target - logsumexp)
    tl.store(entropies + row, logsumexp - tl.sum(weighted * shrink, 0) / total)
    tl.store(logsumexps + row, logsumexp)


@triton.jit
def _logit_gradient(logits, targets, temperatures, logsumexps, grads, out, vocabulary, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < vocabulary
    scale = 1.0 / tl.load(temperatures + row)
    x = tl.load(logits + row * stride + lanes, mask=inside, other=0.0) * scale
    grad = tl.load(grads + row) * scale
    # d logp / d logit = onehot - softmax
    change = tl.where(lanes == tl.load(targets + row), 1.0, 0.0) - tl.exp(x - tl.load(logsumexps + row))
    tl.store(out + row * vocabulary + lanes, (grad * change).to(out.dtype.element_ty), mask=inside)
