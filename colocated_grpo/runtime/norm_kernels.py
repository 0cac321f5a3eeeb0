"""Triton kernels of RMS norms and rotary embeddings, for `numerics: exact`, and their backward pass.

Rows are processed in halves, because rotary embeddings combine each number with the one half a row further. The order
of summation depends on the number of columns only, and rotations have the bits of vLLM's kernel, because a product of
two 16-bit numbers is exact in float32. So the bits are the same with vLLM's separate kernels and with
`rollout/vllm/qkv_kernel.py`.

Shapes: T tokens, H columns of a row: the hidden size, or the size of a head.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocated_grpo.runtime.row_kernels import num_processors
from colocated_grpo.runtime.triton_jit import jit

BLOCK = 1024
"""Pairs of numbers, one of each half of a row, that a program reads at a time."""
PAIRS_PER_WARP = 256
"""With this number, each lane reads 16 bytes of each half."""
PROGRAMS_PER_PROCESSOR = 8
"""Programs of the backward pass. Each adds up the weight's gradient of many rows."""


def normalize(
    x: Tensor,
    weight_H: Tensor | None,
    epsilon: float,
    offset: float,
    positions_T: Tensor | None = None,
    table: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return x / rms(x) * (weight + offset), computed in float32 and rounded, then rotated and rounded again.

    x: [..., H] with an even H, or heads [T, heads, H] with any strides but for the last. weight_H: None: no norm.
    positions_T, table: of heads to rotate; table: [positions, H], the cosines of H / 2 angles, then their sines.
    residual: like x and contiguous; it is added to x before the norm, and overwritten with the rounded sum.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert residual is None or residual.is_contiguous()
    if out.numel():
        blocks, inputs, settings = _launch(x, weight_H, epsilon, offset, positions_T, table)
        _normalize[(blocks,)](*inputs, out if residual is None else residual, out, ADD=residual is not None, **settings)
    return out


class Normalize(torch.autograd.Function):
    """`normalize` without a residual, and with gradients of x and of the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_H: Tensor | None,
        epsilon: float,
        offset: float,
        positions_T: Tensor | None,
        table: Tensor | None,
    ) -> Tensor:
        ctx.settings = epsilon, offset
        ctx.save_for_backward(None if weight_H is None else x, weight_H, positions_T, table)
        return normalize(x, weight_H, epsilon, offset, positions_T, table)

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_H, positions_T, table = ctx.saved_tensors
        epsilon, offset = ctx.settings
        grad = grad.contiguous()
        out = torch.empty_like(grad)
        blocks, inputs, settings = _launch(grad if x is None else x, weight_H, epsilon, offset, positions_T, table)
        programs = min(blocks, PROGRAMS_PER_PROCESSOR * num_processors(grad.device))
        of_weight = ctx.needs_input_grad[1]
        parts = torch.empty(programs, grad.shape[-1] if of_weight else 0, device=grad.device)
        if programs:
            _normalize_backward[(programs,)](*inputs, grad, out, parts, OF_WEIGHT=of_weight, **settings)
        return out, parts.sum(0).to(weight_H.dtype) if of_weight else None, None, None, None, None


def _launch(
    x: Tensor, weight_H: Tensor | None, epsilon: float, offset: float, positions_T: Tensor | None, table: Tensor | None
) -> tuple[int, tuple[Tensor | float, ...], dict[str, int | bool]]:
    """Return the number of blocks of rows, the arguments common to both kernels, and their compile-time settings."""
    columns, heads = x.shape[-1], x.shape[-2] if x.dim() == 3 else 1
    if heads == 1:
        x = x.reshape(-1, columns)
    assert x.stride(-1) == 1 and columns % 2 == 0
    rows, width = x.numel() // columns, triton.next_power_of_2(columns // 2)
    block = max(1, BLOCK // width)
    # A tensor that is not given is not read.
    tensors = (x if each is None else each for each in (weight_H, positions_T, table))
    settings = {
        "HEADS": heads, "ROWS": block, "COLUMNS": columns, "WIDTH": width, "NORM": weight_H is not None,
        "ROTATE": table is not None, "num_warps": max(1, min(16, block * width // PAIRS_PER_WARP)),
    }  # fmt: skip
    return triton.cdiv(rows, block), (x, rows, x.stride(0), x.stride(-2), epsilon, offset, *tensors), settings


@jit
def load_halves(at, HALF: tl.constexpr, mask):
    """Return both halves of rows in float32, with zeros outside the mask. at: of the first halves."""
    left = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return left, tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)


@jit
def _store(at, left, right, HALF: tl.constexpr, mask):
    tl.store(at, left.to(at.dtype.element_ty), mask=mask)
    tl.store(at + HALF, right.to(at.dtype.element_ty), mask=mask)


@jit
def inverse_rms(left, right, epsilon, COLUMNS: tl.constexpr):
    return tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / COLUMNS + epsilon)[:, None]


@jit
def rotated(left, right, cos, sin):
    return left * cos - right * sin, right * cos + left * sin


@partial(jit, do_not_specialize=["rows"])
def _normalize(
    x, rows, token_stride, head_stride, epsilon, offset, weight, positions, table, residual, out,
    HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    ROTATE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = COLUMNS // 2
    dtype = out.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = column < HALF
    real = (row < rows) & inside
    own = row * COLUMNS + column
    left, right = load_halves(x + row // HEADS * token_stride + row % HEADS * head_stride + column, HALF, real)
    if ADD:
        more_left, more_right = load_halves(residual + own, HALF, real)
        left, right = (left + more_left).to(dtype).to(tl.float32), (right + more_right).to(dtype).to(tl.float32)
        _store(residual + own, left, right, HALF, real)
    if NORM:
        scale = inverse_rms(left, right, epsilon, COLUMNS)
        left_weight, right_weight = load_halves(weight + column, HALF, inside)
        left, right = left * scale * (left_weight + offset), right * scale * (right_weight + offset)
    if ROTATE:
        position = tl.load(positions + row // HEADS, mask=row < rows, other=0)
        cos, sin = load_halves(table + position * COLUMNS + column, HALF, inside)
        left, right = rotated(left.to(dtype).to(tl.float32), right.to(dtype).to(tl.float32), cos, sin)
    _store(out + own, left, right, HALF, real)


@partial(jit, do_not_specialize=["rows"])
def _normalize_backward(
    x, rows, token_stride, head_stride, epsilon, offset, weight, positions, table, grad, out, parts,
    HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    ROTATE: tl.constexpr, OF_WEIGHT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = COLUMNS // 2
    column = tl.arange(0, WIDTH)[None, :]
    inside = column < HALF
    left_total, right_total = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        real = (row < rows) & inside
        own = row * COLUMNS + column
        left, right = load_halves(grad + own, HALF, real)
        if ROTATE:
            position = tl.load(positions + row // HEADS, mask=row < rows, other=0)
            cos, sin = load_halves(table + position * COLUMNS + column, HALF, inside)
            left, right = rotated(left, right, cos, -sin)
        if NORM:
            source = x + row // HEADS * token_stride + row % HEADS * head_stride + column
            unit_left, unit_right = load_halves(source, HALF, real)
            scale = inverse_rms(unit_left, unit_right, epsilon, COLUMNS)
            unit_left, unit_right = unit_left * scale, unit_right * scale
            if OF_WEIGHT:
                left_total += left * unit_left
                right_total += right * unit_right
            left_weight, right_weight = load_halves(weight + column, HALF, inside)
            left, right = left * (left_weight + offset), right * (right_weight + offset)
            along = ((tl.sum(left * unit_left, 1) + tl.sum(right * unit_right, 1)) / COLUMNS)[:, None]
            left, right = scale * (left - unit_left * along), scale * (right - unit_right * along)
        _store(out + own, left, right, HALF, real)
    if OF_WEIGHT:
        part = parts + tl.program_id(0) * COLUMNS + column
        _store(part, tl.sum(left_total, 0, True), tl.sum(right_total, 0, True), HALF, inside)
