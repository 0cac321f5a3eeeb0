"""64-bit fingerprints of weights, by which a sync is verified bit for bit.

The fingerprint of a checkpoint tensor is the sum, modulo 2^64, of bits(x_i) * factor(i): the bits of element i in the
engine's type as a signed number, times an odd pseudo-random factor of its flat index. The fingerprints of parts add up
to that of the whole, so shards, tensor-parallel slices and replicas are compared without gathering them. A change of
one element always changes the fingerprint; a change of several escapes with a probability of about 2^-32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

SPAN_BITS = 15
"""factor(i) = hash(i mod 2^15) * hash(2^15 + i div 2^15): on the CPU one integer dot product for each span of indices,
of a size that torch does not divide among threads."""
SPAN = 1 << SPAN_BITS
MIX = (0x9E3779B1, 0x85EBCA77)
"""Odd multipliers of the hash, which the kernel shares."""
LOW_32 = 0xFFFFFFFF
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""By element size in bytes."""


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
    row = max(1, values[:1].numel()) if values.dim() else 1
    return Part(values, first_row * row, row, row)


def columns_of(values: Tensor, first_column: int, columns: int) -> Part:
    """Return the part that consists of a block of columns. columns: of the checkpoint tensor."""
    return Part(values, first_column, values.shape[1], columns)


def bits_of(values: Tensor) -> Part:
    """Return the bits of all elements, of any type."""
    flat = values.reshape(-1)
    width = next(size for size in (4, 2, 1) if flat.element_size() % size == 0)
    return rows_of(flat.view(BITS[width]), 0)


class Fingerprints:
    """Computes the fingerprints of the same parts again and again."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype | None, device: torch.device) -> None:
        """dtype: cast values to this type first, as a sync does; None: hash them as they are."""
        self._parts = list(parts)
        self._dtype = dtype
        self._device = device
        self._resident = [index for index, part in enumerate(parts) if part.values.is_cuda]
        self._launches = []
        if self._resident:
            # Imported here: it needs Triton, which CPU installations lack.
            from colocated_grpo.weights.fingerprint_kernel import plan_launches

            self._launches = plan_launches([(index, self._parts[index]) for index in self._resident], dtype)

    def compute(self) -> Tensor:
        """Return the fingerprints, int64 [parts], on the device."""
        found = torch.zeros(len(self._parts), dtype=torch.int64, device=self._device)
        for launch in self._launches:
            launch(found)
        resident = set(self._resident)
        for index, part in enumerate(self._parts):
            if index not in resident:
                found[index] = self._of_host_tensor(part)
        return found

    def _of_host_tensor(self, part: Part) -> Tensor:
        if self._device.type == "cpu":
            return fingerprint(part, self._dtype)
        uploaded = part._replace(values=part.values.to(self._device))
        return Fingerprints([uploaded], self._dtype, self._device).compute()[0]


def fingerprint(part: Part, dtype: torch.dtype | None = None) -> Tensor:
    """Return the fingerprint of a part on the CPU, as an int64 scalar."""
    values, total = part.values.reshape(-1), torch.zeros((), dtype=torch.int64)
    done = 0
    while done < len(values):
        chunk = values[done : done + SPAN - (part.first + done) % SPAN]
        bits = chunk if dtype is None else chunk.to(dtype)
        bits = bits.view(BITS[bits.element_size()]).to(torch.int64)
        total += _sum_of_rows(bits, part.first + done) if _has_whole_rows(part) else _sum_of_columns(bits, part, done)
        done += len(chunk)
    return total


def _has_whole_rows(part: Part) -> bool:
    return part.row == part.row_stride


def _sum_of_rows(bits: Tensor, first: int) -> Tensor:
    """first: index of the first element; the elements lie in one span."""
    start = first % SPAN
    return torch.dot(bits, _span_factors()[start : start + len(bits)]) * _hash(SPAN + torch.tensor(first // SPAN))


def _sum_of_columns(bits: Tensor, part: Part, done: int) -> Tensor:
    """done: elements of the part before these."""
    local = torch.arange(done, done + len(bits))
    index = part.first + local.div(part.row, rounding_mode="floor") * part.row_stride + local % part.row
    return torch.dot(bits, _span_factors()[index % SPAN] * _hash(SPAN + index.div(SPAN, rounding_mode="floor")))


@cache
def _span_factors() -> Tensor:
    return _hash(torch.arange(SPAN))


def _hash(number: Tensor) -> Tensor:
    """Return an odd 32-bit hash of each number, as int64."""
    mixed = number * MIX[0] & LOW_32
    mixed = (mixed ^ mixed >> 15) * MIX[1] & LOW_32
    return mixed ^ mixed >> 13 | 1
