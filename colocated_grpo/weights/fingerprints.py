"""64-bit fingerprints of weights, which verify a sync bit for bit.

The fingerprint of a checkpoint tensor is the sum, modulo 2^64, of bits(x_i) * factor(i): the bits of element i in the
engine's type as a signed number, times an odd pseudo-random factor of its flat index. The fingerprints of a tensor's
parts add up to the fingerprint of the whole tensor, so shards, tensor-parallel slices and replicas are compared without
gathering them. A change of one element always changes the fingerprint; a change of several elements escapes with a
probability of about 2^-30.
"""

from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

SPAN_BITS = 12
"""factor(i) = hash(i mod 2^12) * hash(2^12 + i div 2^12). Each hash is applied to a span of indices at once."""
SPAN = 1 << SPAN_BITS
SPANS = 8
"""Spans summed in one operation: few enough that torch does not divide its CPU operations among threads."""
MIX = (0x9E3779B1, 0x85EBCA77)
"""Odd multipliers of the hash, also used by the kernel."""
LOW_31, LOW_32 = 0x7FFFFFFF, 0xFFFFFFFF
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Integer type of an element's bits, by element size in bytes."""


class Part(NamedTuple):
    """Consecutive rows of a checkpoint tensor, or a block of its columns."""

    values: Tensor
    """Contiguous."""
    first: int
    """Flat index in the checkpoint tensor of the first element."""
    row: int
    """Elements of one row of `values`."""
    row_stride: int
    """Flat indices between the starts of two rows; equal to `row` for whole rows."""


def rows_of(values: Tensor, first_row: int) -> Part:
    """Return the part that consists of whole rows from `first_row` on."""
    row = max(1, prod(values.shape[1:]))
    return Part(values, first_row * row, row, row)


def columns_of(values: Tensor, first_column: int, columns: int) -> Part:
    """Return the part that consists of a block of columns. columns: number of columns of the checkpoint tensor."""
    return Part(values, first_column, values.shape[1], columns)


def bits_of(values: Tensor) -> Part:
    """Return the bits of all elements, of any type."""
    flat = values.reshape(-1)
    width = next(size for size in (4, 2, 1) if flat.element_size() % size == 0)
    return rows_of(flat.view(BITS[width]), 0)


def fingerprint(part: Part, dtype: torch.dtype | None = None) -> Tensor:
    """Return the fingerprint of a part on the CPU, as an int64 scalar. dtype: as of `transport.Fingerprints`."""
    values, total = part.values.reshape(-1), torch.zeros((), dtype=torch.int64)
    done = 0
    while done < len(values):
        start = part.first + done
        # First the rest of a partial span, then whole spans.
        length = SPAN - start % SPAN if start % SPAN or len(values) - done < SPAN else SPANS * SPAN
        chunk = values[done : done + length]
        if len(chunk) > SPAN:
            chunk = chunk[: len(chunk) // SPAN * SPAN]
        bits = chunk.to(dtype) if dtype is not None and chunk.is_floating_point() else chunk
        bits = bits.view(BITS[bits.element_size()]).to(torch.int64)
        total += _sum_of_rows(bits, start) if part.row == part.row_stride else _sum_of_columns(bits, part, done)
        done += len(chunk)
    return total


def _sum_of_rows(bits: Tensor, first: int) -> Tensor:
    """Sum consecutive elements. bits: part of one span, or whole spans. first: index of the first element."""
    start, span = first % SPAN, first // SPAN
    if len(bits) <= SPAN:
        return torch.dot(bits, _span_factors()[start : start + len(bits)]) * _hash(torch.tensor(SPAN + span))
    sums = torch.mv(bits.view(-1, SPAN), _span_factors())
    return torch.dot(sums, _hash(torch.arange(SPAN + span, SPAN + span + len(sums))))


def _sum_of_columns(bits: Tensor, part: Part, done: int) -> Tensor:
    """Sum elements of a block of columns. done: number of the part's elements before `bits`."""
    local = torch.arange(done, done + len(bits))
    index = part.first + local.div(part.row, rounding_mode="floor") * part.row_stride + local % part.row
    return torch.dot(bits, _span_factors()[index % SPAN] * _hash(SPAN + index.div(SPAN, rounding_mode="floor")))


@cache
def _span_factors() -> Tensor:
    return _hash(torch.arange(SPAN))


def _hash(number: Tensor) -> Tensor:
    """Return an odd 31-bit hash of each number, as int64."""
    mixed = number * MIX[0] & LOW_32
    mixed = (mixed ^ mixed >> 15) * MIX[1] & LOW_32
    return (mixed ^ mixed >> 13) & LOW_31 | 1
