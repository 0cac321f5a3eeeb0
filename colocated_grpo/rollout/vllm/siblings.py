"""Triton kernel that finds sequences whose caches begin with the same blocks: completions of one prompt.

vLLM's prefix cache keeps one copy of a prompt's whole blocks, which adjacent sequences of a batch read. `decode_prefix`
reads them once for several sequences. The kernel compares block ids, so it can be part of a CUDA graph.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocated_grpo.runtime.triton_jit import jit

FEWEST_LANES = 256
"""Smaller batches use the same compiled kernel."""
LEAST_COMMON_TOKENS = 64
"""Fewest common tokens for which `decode_prefix` is used: its results must be written and read again."""
AT_ONCE = 16
"""Blocks of a sequence that are compared at once."""


class Siblings(NamedTuple):
    """Sets of adjacent sequences that are read together. All int32."""

    firsts: Tensor
    """[B] index of the first sequence of each set. Only the first `num_sets` numbers are written."""
    counts: Tensor
    """[B] for each sequence, the number of sequences in its set; 1 without siblings, which is no set."""
    tokens: Tensor
    """[B] for each sequence, tokens of the whole blocks that its set has in common; 0 without siblings."""
    num_sets: Tensor
    """[1]"""


def find_siblings(table: Tensor, lengths: Tensor, block_size: int, most: int) -> Siblings:
    """Return which adjacent sequences have whole blocks in common, and how many tokens these are.

    table: [B, ...] block ids; lengths: [B] int32 tokens. most: sequences that can be read together.
    """
    kind = {"dtype": torch.int32, "device": table.device}
    firsts, counts, tokens, starts, common = torch.empty(5, len(table), **kind).unbind()
    num_sets = torch.empty(1, **kind)
    lanes = max(FEWEST_LANES, triton.next_power_of_2(len(table)))
    _find[(1,)](
        table, lengths, firsts, counts, tokens, num_sets, starts, common, table.stride(0), len(table), most,
        BLOCK=block_size, LANES=lanes, AT_ONCE=AT_ONCE, LEAST_BLOCKS=-(-LEAST_COMMON_TOKENS // block_size),
        num_warps=min(16, lanes // 32),
    )  # fmt: skip
    return Siblings(firsts, counts, tokens, num_sets)


class SiblingsOfStep:
    """Finds the siblings of a batch in its first layer. The other layers of the forward pass read the same table."""

    def __init__(self) -> None:
        self._table: Tensor | None = None
        self._most = 0
        self._siblings: Siblings | None = None
        self._caches: set[int] = set()
        """Caches of the layers that used these siblings. A cache seen again belongs to another forward pass."""

    def of(self, keys: Tensor, table: Tensor, lengths: Tensor, most: int) -> Siblings:
        """keys: the layer's cache, [blocks, block size, K, D]. For the rest see `find_siblings`."""
        cache = keys.data_ptr()
        if self._siblings is None or self._table is not table or self._most != most or cache in self._caches:
            self._table, self._most = table, most
            self._siblings = find_siblings(table, lengths, keys.shape[1], most)
            self._caches.clear()
        self._caches.add(cache)
        return self._siblings


@jit
def _larger(one, other):
    return tl.maximum(one, other)


@jit
def _find(
    table, lengths, firsts, counts, tokens, num_sets, starts, commons, table_sequence, sequences, most,
    BLOCK: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr, LEAST_BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, LANES)
    real = row < sequences
    follows = real & (row > 0)
    length = tl.load(lengths + row, mask=real, other=0)
    length_before = tl.load(lengths + row - 1, mask=follows, other=0)
    whole = tl.minimum(length, length_before) // BLOCK
    common = tl.zeros([LANES], tl.int32)
    column = tl.arange(0, AT_ONCE)[None, :]
    going = whole > 0
    start = 0
    while tl.max(going.to(tl.int32)) > 0:  # pyrefly: ignore[unsupported-operation]  # not a tuple
        inside = going[:, None] & (start + column < whole[:, None])
        at = row[:, None].to(tl.int64) * table_sequence + start + column
        own = tl.load(table + at, mask=inside, other=0)
        before = tl.load(table + at - table_sequence, mask=inside, other=0)
        leading = tl.min(tl.where(inside & (own == before), AT_ONCE, column), 1)
        common += leading * going.to(tl.int32)
        going = going & (leading == AT_ONCE)
        start += AT_ONCE
    run_start = tl.associative_scan(tl.where(common < LEAST_BLOCKS, row, 0), 0, _larger)
    first = run_start + (row - run_start) // most * most
    tl.store(starts + row, first, mask=real)
    tl.store(commons + row, common, mask=real)
    tl.debug_barrier()  # other threads read both
    count = tl.zeros([LANES], tl.int32)
    blocks = tl.full([LANES], 1 << 30, tl.int32)
    for index in range(most):
        at = first + index
        sibling = (at < sequences) & (tl.load(starts + at, mask=at < sequences, other=-1) == first)
        count += sibling.to(tl.int32)
        blocks = tl.minimum(blocks, tl.load(commons + at, mask=sibling & (index > 0), other=1 << 30))
    tl.store(counts + row, count, mask=real)
    tl.store(tokens + row, tl.where(count > 1, blocks * BLOCK, 0), mask=real)
    leads = (count > 1) & (first == row)
    tl.store(firsts + tl.cumsum(leads.to(tl.int32)) - 1, row, mask=leads)
    tl.store(num_sets, tl.sum(leads.to(tl.int32)))
