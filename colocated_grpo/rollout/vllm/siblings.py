"""Triton kernel that finds sequences whose caches begin with the same blocks: completions of one prompt.

vLLM's prefix cache keeps one copy of a prompt's whole blocks, and adjacent sequences of a batch read it. One program of
`decode_attention` reads these blocks once for several of them. The block tables alone say which: no request is looked
up, and the marks are made on the device, inside a CUDA graph.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocated_grpo.runtime.triton_jit import jit

LEAST_BLOCKS = 4
"""Fewest blocks that are worth a program of their own: its results are written, read and added."""
WIDTH = 16
"""Blocks of each sequence that are compared at once."""


class Siblings(NamedTuple):
    """Tiles of adjacent sequences with the same leading blocks, [B] int32 each."""

    first: Tensor
    """Index of the first sequence of the tile."""
    count: Tensor
    """Sequences of the tile, 1 for a sequence without siblings."""
    tokens: Tensor
    """Tokens of the blocks that all sequences of the tile have, 0 for a sequence without siblings."""


def find_siblings(table: Tensor, lengths: Tensor, block_size: int, most: int) -> Siblings:
    """table: [B, ...] block ids; lengths: [B] int32 tokens. most: siblings that one program can take."""
    firsts, counts, tokens, same = torch.empty(4, len(table), dtype=torch.int32, device=table.device).unbind()
    lanes = triton.next_power_of_2(len(table))
    _mark[(1,)](
        table, lengths, firsts, counts, tokens, same, table.stride(0), len(table), most,
        BLOCK=block_size, LANES=lanes, WIDTH=WIDTH, LEAST=LEAST_BLOCKS, num_warps=max(4, min(16, lanes // 32)),
    )  # fmt: skip
    return Siblings(firsts, counts, tokens)


class SiblingsOfStep:
    """Finds the siblings of a batch in its first layer. The other layers of the forward pass read the same table."""

    def __init__(self) -> None:
        self._table: Tensor | None = None
        self._siblings: Siblings | None = None
        self._caches: set[int] = set()
        """Caches of the layers that used these siblings. A cache that comes again begins another forward pass."""

    def of(self, keys: Tensor, table: Tensor, lengths: Tensor, most: int) -> Siblings:
        """keys: the layer's cache, [blocks, block size, K, D]. For the rest see `find_siblings`."""
        cache = keys.data_ptr()
        if self._siblings is None or self._table is not table or cache in self._caches:
            self._table, self._siblings = table, find_siblings(table, lengths, keys.shape[1], most)
            self._caches.clear()
        self._caches.add(cache)
        return self._siblings


@jit
def _larger(one, other):
    return tl.maximum(one, other)


@jit
def _mark(
    table, lengths, firsts, counts, tokens, sames, table_sequence, sequences, most,
    BLOCK: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, LANES)
    real = row < sequences
    follows = real & (row > 0)
    length = tl.load(lengths + row, mask=real, other=0)
    length_before = tl.load(lengths + row - 1, mask=follows, other=0)
    whole = tl.minimum(length, length_before) // BLOCK
    same = tl.zeros([LANES], tl.int32)
    column = tl.arange(0, WIDTH)[None, :]
    going = whole > 0
    start = 0
    while tl.max(going.to(tl.int32)) > 0:  # pyrefly: ignore[unsupported-operation]  # not a tuple
        inside = going[:, None] & (start + column < whole[:, None])
        at = row[:, None].to(tl.int64) * table_sequence + start + column
        own = tl.load(table + at, mask=inside, other=0)
        before = tl.load(table + at - table_sequence, mask=inside, other=0)
        leading = tl.min(tl.where(inside & (own == before), WIDTH, column), 1)
        same += leading * going.to(tl.int32)
        going = going & (leading == WIDTH)
        start += WIDTH
    head = tl.where(same < LEAST, row, 0)
    head = tl.associative_scan(head, 0, _larger)
    first = head + (row - head) // most * most
    tl.store(firsts + row, first, mask=real)
    tl.store(sames + row, same, mask=real)
    tl.debug_barrier()  # other threads read both
    count = tl.zeros([LANES], tl.int32)
    blocks = tl.full([LANES], 1 << 30, tl.int32)
    for index in range(most):
        at = first + index
        sibling = (at < sequences) & (tl.load(firsts + at, mask=at < sequences, other=-1) == first)
        count += sibling.to(tl.int32)
        blocks = tl.minimum(blocks, tl.load(sames + at, mask=sibling & (index > 0), other=1 << 30))
    tl.store(counts + row, count, mask=real)
    tl.store(tokens + row, tl.where(count > 1, blocks * BLOCK, 0), mask=real)
