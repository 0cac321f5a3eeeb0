"""Fingerprints on a GPU: one Triton kernel hashes all tensors of one type, whatever their number."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from colocated_grpo.runtime.triton_jit import jit
from colocated_grpo.weights.fingerprints import LOW_31, MIX, SPAN, SPAN_BITS, SPANS, Part

ALIGNMENT = 16
"""Values whose address and index are multiples of this number are loaded as vectors."""
_MIX_0 = tl.constexpr(MIX[0])
_MIX_1 = tl.constexpr(MIX[1])
_SPAN = tl.constexpr(SPAN)
_SPAN_BITS = tl.constexpr(SPAN_BITS)
_SPANS = tl.constexpr(SPANS)
_LOW_31 = tl.constexpr(LOW_31)
_POINTEES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
}
_SIGNED = {1: tl.int8, 2: tl.int16, 4: tl.int32}


@dataclass(frozen=True, kw_only=True)
class KernelLaunch:
    """The kernel and its tables for tensors of one type."""

    table: Tensor
    """[tensors, 6]: address, elements, first index, row, row stride, place in the result."""
    places: Tensor
    """[programs, 2]: row of `table`, and index of a block of SPANS spans in that row's tensor."""
    values: list[Tensor]
    """The tensors whose addresses the table holds."""
    constants: dict[str, object]

    def __call__(self, sums: Tensor) -> None:
        """Add the fingerprints to int64 sums [parts]."""
        _add_fingerprints[(len(self.places),)](self.table, self.places, sums, **self.constants)


def plan_launches(parts: Sequence[tuple[int, Part]], dtype: torch.dtype | None) -> list[KernelLaunch]:
    """Return the launches for all parts. parts: (place in the result, part)."""
    kinds: dict[tuple[torch.dtype, bool, bool], list[tuple[int, Part]]] = defaultdict(list)
    for place, part in parts:
        if part.values.numel():
            aligned = part.values.data_ptr() % ALIGNMENT == 0 and part.first % ALIGNMENT == 0
            kinds[part.values.dtype, part.row != part.row_stride, aligned].append((place, part))
    return [_plan(members, dtype, *kind) for kind, members in kinds.items()]


def _plan(
    parts: Sequence[tuple[int, Part]], dtype: torch.dtype | None, source: torch.dtype, columns: bool, aligned: bool
) -> KernelLaunch:
    device = parts[0][1].values.device
    entries = [
        [part.values.data_ptr(), part.values.numel(), part.first, part.row, part.row_stride, place]
        for place, part in parts
    ]
    # Not by triton.cdiv: its call takes the host longer than this division.
    counts = [-(-(part.first % SPAN + part.values.numel()) // (SPANS * SPAN)) for _, part in parts]
    owners = np.repeat(np.arange(len(parts)), counts)
    stretches = np.concatenate([np.arange(count) for count in counts])
    target = dtype if dtype is not None and source.is_floating_point else source
    return KernelLaunch(
        table=torch.tensor(entries, dtype=torch.int64).to(device, non_blocking=True),
        places=torch.from_numpy(np.stack([owners, stretches], axis=1).astype(np.int32)).to(device, non_blocking=True),
        values=[part.values for _, part in parts],
        constants={
            "SOURCE": _POINTEES[source],
            "TARGET": _POINTEES[target],
            "BITS": _SIGNED[target.itemsize],
            "COLUMNS": columns,
            "ALIGNED": ALIGNMENT if aligned else 1,
        },
    )


@jit
def _hash(number):
    mixed = number.to(tl.uint32) * _MIX_0
    mixed = (mixed ^ (mixed >> 15)) * _MIX_1
    return ((mixed ^ (mixed >> 13)) & _LOW_31 | 1).to(tl.int32).to(tl.int64)


@jit
def _add_fingerprints(
    table, places, sums,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    entry = table + tl.load(places + 2 * program) * 6
    stretch = tl.load(places + 2 * program + 1).to(tl.int64) * _SPANS
    address = tl.load(entry).to(tl.pointer_type(SOURCE))  # pyrefly: ignore[bad-argument-type]
    values = tl.multiple_of(address, ALIGNED)
    count, first = tl.load(entry + 1), tl.load(entry + 2)
    row, row_stride, place = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    start = tl.multiple_of(stretch * _SPAN - first % _SPAN, ALIGNED)
    lane = tl.arange(0, _SPAN)
    total = tl.zeros((_SPAN,), tl.int64)
    for number in range(_SPANS):
        local = start + number * _SPAN + lane
        mask = (local >= 0) & (local < count)
        # Through int32: one instruction multiplies two 32-bit numbers to 64 bits.
        bits = tl.load(values + local, mask=mask, other=0).to(TARGET).to(BITS, bitcast=True).to(tl.int32).to(tl.int64)
        if COLUMNS:
            index = first + local // row * row_stride + local % row
            factor = _hash(index % _SPAN) * _hash((index >> _SPAN_BITS) + _SPAN)
            total += tl.where(mask, bits * factor, 0)
        else:
            total += bits * _hash((first >> _SPAN_BITS) + stretch + number + _SPAN)
    if not COLUMNS:
        total *= _hash(lane)
    tl.atomic_add(sums + place, tl.sum(total, 0))
