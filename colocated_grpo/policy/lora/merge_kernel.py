"""The merge on a GPU: one Triton kernel per weight reads the base, adds the adapter's product, rounds, and writes.
Another one unpacks a 4-bit base first."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocated_grpo.policy.lora.dither import MIX
from colocated_grpo.runtime.triton_jit import jit

BLOCKS = {"BLOCK_R": 64, "BLOCK_C": 128, "BLOCK_K": 32}
"""Rows, columns and ranks of a program."""
CODES = 1024
"""Elements of a row that a program unpacks."""
_MIX_0 = tl.constexpr(MIX[0])
_MIX_1 = tl.constexpr(MIX[1])
_MIX_2 = tl.constexpr(MIX[2])


def merge(out: Tensor, base: Tensor, left: Tensor, right: Tensor, scale: float, key: int, first: int) -> None:
    """The same as `colocated_grpo.policy.lora.linear.merge`, up to the order of additions in the product."""
    rows, columns = out.shape
    if rows == 0:
        return
    grid = (triton.cdiv(rows, BLOCKS["BLOCK_R"]), triton.cdiv(columns, BLOCKS["BLOCK_C"]))
    sizes, strides = (rows, columns, right.shape[0]), (out.stride(0), base.stride(0), *left.stride(), *right.stride())
    constants = {"DITHERED": out.dtype == torch.bfloat16} | BLOCKS
    _merge[grid](out, base, left, right, scale, key, first, *sizes, *strides, **constants)


@partial(jit, do_not_specialize=("key",))
def _merge(
    out, base, left, right, scale, key, first, rows, columns, rank, out_stride, base_stride, left_stride_r,
    left_stride_k, right_stride_k, right_stride_c,
    DITHERED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    product = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(0, rank, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left_part = tl.load(
            left + r[:, None] * left_stride_r + k[None, :] * left_stride_k,
            mask=(r[:, None] < rows) & (k[None, :] < rank),
            other=0.0,
        )
        right_part = tl.load(
            right + k[:, None] * right_stride_k + c[None, :] * right_stride_c,
            mask=(k[:, None] < rank) & (c[None, :] < columns),
            other=0.0,
        )
        # Three TF32 products per float32 product: nearly exact, and several times faster than without tensor cores.
        product = tl.dot(left_part, right_part, product, input_precision="tf32x3")
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    exact = tl.load(base + r[:, None] * base_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    exact += scale * product
    if DITHERED:
        index = (first + r[:, None] * columns + c[None, :]).to(tl.uint32)
        exact = _dithered(exact, index, key)
    tl.store(out + r[:, None] * out_stride + c[None, :], exact.to(out.dtype.element_ty), mask=inside)


@jit
def _dithered(exact, index, key):
    x = index * _MIX_0 + key.to(tl.uint32)
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 15)) * _MIX_2
    bits = exact.to(tl.uint32, bitcast=True) + ((x ^ (x >> 16)) >> 16)
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


def unpack(out: Tensor, packed: Tensor, levels: Tensor, block: int) -> None:
    """Write the 4-bit weight `packed` into `out`, [rows, columns]. levels: [16]. block: elements of a row per scale."""
    rows, columns = out.shape
    if rows:
        grid = (rows, triton.cdiv(columns, CODES))
        _unpack[grid](out, packed.view(torch.uint8), packed, levels, columns, packed.stride(0), block, CODES)


@jit
def _unpack(out, codes, scales, levels, columns, stride, BLOCK: tl.constexpr, CODES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CODES + tl.arange(0, CODES)
    inside = c < columns
    pair = tl.load(codes + row * stride * 4 + c // 2, mask=inside, other=0).to(tl.int32)
    level = tl.load(levels + tl.where(c % 2 == 0, pair >> 4, pair & 15))
    scale = tl.load(scales + row * stride + columns // 8 + c // BLOCK, mask=inside, other=0.0)
    tl.store(out + row * columns + c, (level * scale).to(out.dtype.element_ty), mask=inside)
