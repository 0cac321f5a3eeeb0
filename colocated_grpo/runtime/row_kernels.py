"""Triton kernels of rows: matrix product, gated activation and choice of experts; sums of the gradients of shared keys.

With `numerics: exact` on GPUs, engine and policy call the first three and those of `norm_kernels.py`. The result of a
row then has the same bits in a decode step of one token and in a training batch of many thousand: each row is reduced
in an order that only the number of its columns decides. Launch settings that change this order must therefore never
depend on the number of rows.

Shapes: T rows, I input features, O output features, H hidden size, V vocabulary, E experts, K experts of a row.
"""

from functools import cache, partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from colocated_grpo.runtime.triton_jit import jit

WIDEST_SUM = 4096
"""Columns of a row that one program of `sum_keys` adds."""


class Tile(NamedTuple):
    """Launch settings of the matrix product. All give the same bits: each sum adds 16 products at a time, in order."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILES = (
    Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 5), Tile(64, 256, 64, 4, 4),
    Tile(64, 128, 128, 4, 4), Tile(64, 64, 128, 4, 6), Tile(64, 32, 256, 4, 4),
)  # fmt: skip
FOR_FEW_ROWS = Tile(16, 32, 256, 4, 4)
START = 4000
"""Fixed cost of a tile, in elements: a tile takes as long as its elements and START more. Fitted to
docs/results/row_products_1xh200.json, where the chosen tile takes 3 % longer than the fastest, on average."""
NARROW = 64
"""Most columns of a tile for which descriptors are slower than addresses if the last tile lacks rows."""
LARGE = 2**33
"""Multiplications of a product that takes longer than making its descriptors."""
PADDING = 64
"""vLLM pads the vocabulary to a multiple of this."""
GROUP = 8
"""Tiles of rows that share the weights in the L2 cache."""


def matmul(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """Return x @ weight.T + bias, accumulated in float32 and rounded once.

    x: [..., I], with contiguous features like the weight. tile: default: chosen by the number of rows and columns.
    """
    x_TI = x.reshape(-1, x.shape[-1])
    out_TO = torch.empty(len(x_TI), len(weight_OI), dtype=x.dtype, device=x.device)
    _launch(x_TI, weight_OI, bias_O, out_TO, tile)
    return out_TO.view(*x.shape[:-1], len(weight_OI))


def logits(x_TI: Tensor, weight_VI: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias in float32, [T, V], in rows as long as those of the engine's output layer.

    Triton compiles the sampler's kernels for the alignment of the rows, and their order of summation depends on it.
    """
    columns = len(weight_VI)
    out_TV = torch.empty(len(x_TI), -(-columns // PADDING) * PADDING, device=x_TI.device)[:, :columns]
    _launch(x_TI, weight_VI, bias_V, out_TV, None)
    return out_TV


def _launch(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_TO: Tensor, tile: Tile | None) -> None:
    rows, columns, depth = *out_TO.shape, x_TI.shape[1]
    assert x_TI.stride(1) == weight_OI.stride(1) == out_TO.stride(1) == 1
    if not rows:
        return
    bias = weight_OI if bias_O is None else bias_O
    matrices, processors = (x_TI, weight_OI, out_TO), num_processors(x_TI.device)
    tile = tile or _fastest_tile(rows, columns, processors)
    # Making descriptors takes the host longer than a small product. A CUDA graph makes them once.
    is_worth_it = rows * columns * depth > LARGE or (x_TI.is_cuda and torch.cuda.is_current_stream_capturing())
    is_slow = tile.rows < 64 or (tile.columns <= NARROW and rows % tile.rows)
    if not is_worth_it or is_slow or not all(map(_is_aligned, matrices)):
        _matmul[(_count(rows, columns, tile),)](
            x_TI, weight_OI, bias, out_TO, rows, columns, depth, *(matrix.stride(0) for matrix in matrices),
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=GROUP,
            EVEN=depth % tile.depth == 0, HAS_BIAS=bias_O is not None, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return
    parts = 2 if tile.columns == 256 else 1  # the widest output tile is stored in halves, to save shared memory
    blocks = [tile.rows, tile.depth], [tile.columns, tile.depth], [tile.rows, tile.columns // parts]
    _matmul_by_descriptors[(min(processors, _count(rows, columns, tile)),)](
        *map(TensorDescriptor.from_tensor, matrices, blocks), bias, rows, columns, depth,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=GROUP, PROCESSORS=processors,
        PARTS=parts, HAS_BIAS=bias_O is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _is_aligned(matrix: Tensor) -> bool:
    """Return True if the GPU can copy tiles of the matrix by descriptors."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


def _count(rows: int, columns: int, tile: Tile) -> int:
    return triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)


def _fastest_tile(rows: int, columns: int, processors: int) -> Tile:
    """Return the tile with the least estimated time: each processor computes one tile after the other."""
    if rows <= FOR_FEW_ROWS.rows:
        return FOR_FEW_ROWS
    return min(
        TILES,
        key=lambda tile: triton.cdiv(_count(rows, columns, tile), processors) * (tile.rows * tile.columns + START),
    )


@cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@partial(jit, do_not_specialize=["rows"])
def _matmul_by_descriptors(
    x, weight, out, bias, rows, columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PROCESSORS: tl.constexpr,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    across, down = tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), across * down, PROCESSORS, flatten=True):
        first = tile // (GROUP * across) * GROUP
        height = tl.minimum(down - first, GROUP)
        row = (first + tile % (GROUP * across) % height) * ROWS
        column = tile % (GROUP * across) // height * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, depth, DEPTH):
            total = tl.dot(x.load([row, start]), weight.load([column, start]).T, total, input_precision="ieee")
        if HAS_BIAS:
            place = column + tl.arange(0, COLUMNS)
            total += tl.load(bias + place, mask=place < columns, other=0.0).to(tl.float32)[None, :]
        if PARTS == 1:
            out.store([row, column], total.to(out.dtype))
        else:
            left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
            out.store([row, column], left.to(out.dtype))
            out.store([row, column + COLUMNS // 2], right.to(out.dtype))


# Triton would compile one row, and multiples of 16 rows, separately.
@partial(jit, do_not_specialize=["rows"])
def _matmul(
    x, weight, bias, out, rows, columns, depth, x_row, weight_row, out_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    first = tile // (GROUP * across) * GROUP
    height = tl.minimum(tl.cdiv(rows, ROWS) - first, GROUP)
    row = (first + tile % (GROUP * across) % height) * ROWS + tl.arange(0, ROWS)
    column = tile % (GROUP * across) // height * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    # Rows past the end are not stored. They read different rows: many reads of one row would wait for its cache lines.
    left = x + (row % rows).to(tl.int64)[:, None] * x_row + step[None, :]
    right = weight + (column % columns).to(tl.int64)[None, :] * weight_row + step[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        if EVEN:
            a, b = tl.load(left), tl.load(right)
        else:
            a = tl.load(left, mask=step[None, :] < depth - start, other=0.0)
            b = tl.load(right, mask=step[:, None] < depth - start, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += DEPTH
        right += DEPTH
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


def gated(gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
    """Return silu(gate) * up, or with the tanh approximation of GELU, in float32 and rounded once.

    gate, up: [..., I], which may be the two halves of one tensor.
    """
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    width = gate.shape[-1]
    rows, block = out.numel() // width, 1024
    assert gate.stride(-1) == up.stride(-1) == 1 and gate.stride() == up.stride()
    if rows:
        _gated[(rows, triton.cdiv(width, block))](
            gate, up, out, width, gate.stride(-2), GELU=gelu, BLOCK=block, num_warps=4
        )
    return out


@jit
def _gated(gate, up, out, width, stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    g = tl.load(gate + row * stride + column, mask=real, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + column, mask=real, other=0.0).to(tl.float32)
    # (1 + tanh(z)) / 2 is the sigmoid of 2z.
    z = 1.5957691216057308 * (g + 0.044715 * g * g * g) if GELU else g
    tl.store(out + row * width + column, (g / (1.0 + tl.exp(-z)) * u).to(out.dtype.element_ty), mask=real)


def choose_experts(logits_TE: Tensor, chosen: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the K largest probabilities of each row, [T, K] float32, and their experts, int32.

    chosen: K. normalised: divide the probabilities by their sum. Of equal logits, the first are chosen.
    """
    rows, experts = logits_TE.shape
    weights_TK = torch.empty(rows, chosen, device=logits_TE.device)
    experts_TK = torch.empty(rows, chosen, dtype=torch.int32, device=logits_TE.device)
    if rows:
        _choose_experts[(rows,)](
            logits_TE, weights_TK, experts_TK, logits_TE.stride(0), EXPERTS=experts, CHOSEN=chosen,
            WIDTH=triton.next_power_of_2(experts), SLOTS=triton.next_power_of_2(chosen), NORMALISED=normalised,
            num_warps=1,
        )  # fmt: skip
    return weights_TK, experts_TK


@jit
def _choose_experts(
    logits, weights, experts, stride,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, WIDTH), tl.arange(0, SLOTS)
    logit = tl.load(logits + row * stride + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    left = tl.exp(logit - tl.max(logit, 0))
    left = left / tl.sum(left, 0)
    left = tl.where(expert < EXPERTS, left, -1.0)
    found, places = tl.zeros([SLOTS], tl.float32), tl.zeros([SLOTS], tl.int32)
    for each in range(CHOSEN):
        largest = tl.max(left, 0)
        place = tl.min(tl.where(left == largest, expert, WIDTH), 0)
        found, places = tl.where(slot == each, largest, found), tl.where(slot == each, place, places)
        left = tl.where(expert == place, -1.0, left)
    if NORMALISED:
        found = found / tl.sum(found, 0)
    at = row * CHOSEN + slot
    tl.store(weights + at, found, mask=slot < CHOSEN)
    tl.store(experts + at, tl.minimum(places, EXPERTS - 1), mask=slot < CHOSEN)  # a row of NaN has found none


def sum_keys(grad_EKD: Tensor, keys_E: Tensor, starts_E: Tensor, rows: int) -> Tensor:
    """Return the sum [T, K, D] of the gradients of each row's keys, added in float32 and in a fixed order.

    keys_E, starts_E: see `PrefixKeys`. rows: T. Keys after the last row's are left out.
    """
    width = grad_EKD[0].numel()
    out_TKD = grad_EKD.new_empty(rows, *grad_EKD.shape[1:])
    block = min(WIDEST_SUM, triton.next_power_of_2(width))
    tensors = grad_EKD.contiguous(), keys_E, starts_E, out_TKD
    _sum_keys[(rows, triton.cdiv(width, block))](*tensors, width, BLOCK=block, num_warps=max(1, block // 256))
    return out_TKD


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
