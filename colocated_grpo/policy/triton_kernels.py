"""Triton kernels of the backward pass: gradients of logits, and sums of the gradients of shared keys.

One program handles one row (token), block by block. Logits are float32 [C, V] with contiguous rows: C tokens of one
chunk, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocated_grpo.runtime.triton_jit import jit

BLOCK = 4096


def logit_gradient(
    logits_CV: Tensor, per_row: tuple[Tensor, Tensor, Tensor, Tensor], dtype: torch.dtype, softcap: float | None
) -> Tensor:
    """Return the gradient of sum(grad * log p(target)) with respect to the uncapped logits, [C, V] in `dtype`.

    The gradient overwrites the logits: a second matrix of their size would be the largest tensor of a training step.
    per_row: targets, temperatures, log-sum-exps and grad, each [C].
    """
    rows, vocabulary = logits_CV.shape
    out_CV = logits_CV.view(dtype)[:, :vocabulary]
    tensors = logits_CV, *per_row, out_CV
    sizes = vocabulary, logits_CV.stride(0), out_CV.stride(0)
    inverse = 0.0 if softcap is None else 1.0 / softcap
    _logit_gradient[(rows,)](*tensors, *sizes, inverse, BLOCK=BLOCK, num_warps=8)
    return out_CV


def sum_keys(grad_EKD: Tensor, keys_E: Tensor, starts_E: Tensor, rows: int) -> Tensor:
    """Return the sum [T, K, D] of the gradients of each row's keys, added in float32 and in a fixed order.

    keys_E, starts_E: see `PrefixKeys`. rows: T. Keys after the last row's are left out.
    """
    width = grad_EKD[0].numel()
    out_TKD = grad_EKD.new_empty(rows, *grad_EKD.shape[1:])
    block = min(BLOCK, triton.next_power_of_2(width))
    tensors = grad_EKD.contiguous(), keys_E, starts_E, out_TKD
    _sum_keys[(rows, triton.cdiv(width, block))](*tensors, width, BLOCK=block, num_warps=max(1, block // 256))
    return out_TKD


@jit
def _logit_gradient(
    logits, targets, temperatures, logsumexps, grads, out, vocabulary, stride, out_stride, inverse_cap,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    out += row * out_stride
    scale = 1.0 / tl.load(temperatures + row)
    grad = tl.load(grads + row) * scale
    target = tl.load(targets + row)
    logsumexp = tl.load(logsumexps + row)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, vocabulary, BLOCK):
        inside = start + lanes < vocabulary
        x = tl.load(logits + start + lanes, mask=inside, other=0.0)
        # d logp / d logit = (onehot - softmax) / temperature, times the slope of the cap.
        change = tl.where(start + lanes == target, 1.0, 0.0) - tl.exp(x * scale - logsumexp)
        slope = 1.0 - (x * inverse_cap) * (x * inverse_cap)
        # `out` overwrites the start of this row of logits. The barrier ensures that each block is read in full before
        # it is written. The output is at most as wide as the logits, so it never overwrites later blocks.
        tl.debug_barrier()
        tl.store(out + start + lanes, (grad * change * slope).to(out.dtype.element_ty), mask=inside)


@jit
def _sum_keys(grad, keys, starts, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(tl.load(starts + row), tl.load(starts + row + 1)):
        key = tl.load(keys + place)
        total += tl.load(grad + key * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)
