"""Triton kernel for one-token attention over the paged KV cache, for batches large enough to fill the device.

A decode step reads the weights once for all sequences, but a separate KV cache for each. With many sequences attention
is limited by the bandwidth of these reads. FlashAttention 3 is as fast for long sequences, but takes up to 2.7 times as
long for many short ones: docs/results/decode_uneven_1xh200.json.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocated_grpo.runtime.triton_jit import jit

FEWEST_SEQUENCES = 32
HEAD_SIZES = (64, 128, 256)
USUAL_HEAD_SIZE = 128
MOST_QUERY_HEADS = 16
"""Largest number of query heads per key-value head. These heads are the rows of one tile."""
MOST_PARTS = 8
MOST_PROGRAMS = 16_384
LEAST_TOKENS = 512
"""Fewest tokens of a part."""


class LaunchShape(NamedTuple):
    """Launch settings of one program, which walks through one sequence."""

    tile: int
    """Tokens per iteration at head size USUAL_HEAD_SIZE; fewer for larger heads."""
    warps: int
    stages: int

    @property
    def shared_memory(self) -> int:
        """Bytes of 16-bit keys and values: one tile is processed while the other stages are read."""
        return self.stages * self.tile * 2 * USUAL_HEAD_SIZE * 2


FOR_FEW = LaunchShape(tile=128, warps=4, stages=2)


def shape_for(programs: int, shared_memory: int) -> LaunchShape:
    """Return the fastest shape over even and uneven lengths. Few programs need large tiles: more reads are in flight.

    programs: pairs of a sequence and a key-value head. shared_memory: bytes available to one program; consumer devices
    have too few bytes for FOR_FEW.
    """
    few = programs < 512 and shared_memory >= FOR_FEW.shared_memory
    return FOR_FEW if few else LaunchShape(tile=64, warps=4, stages=2)


def make_attention(vllm_attention: Callable[..., object], count_use: Callable[[], None]) -> Callable[..., object]:
    """Return the backend's `flash_attn_varlen_func` that uses this kernel for supported calls.

    The backend passes keywords only. Install before CUDA graphs are captured.
    """

    def attend(**arguments: Any) -> object:
        if not suits(arguments):
            return vllm_attention(**arguments)
        count_use()
        names = ("q", "k", "v", "out", "block_table", "seqused_k", "softmax_scale")
        return decode(*(arguments[name] for name in names))

    return attend


def suits(arguments: dict[str, Any]) -> bool:
    """True for one token of each of many sequences, with plain attention over a 16-bit paged cache."""
    query, keys, table = arguments["q"], arguments["k"], arguments.get("block_table")
    if table is None or arguments["max_seqlen_q"] != 1 or len(query) < FEWEST_SEQUENCES or len(query) != len(table):
        return False
    window = arguments.get("window_size")
    plain = all(arguments.get(name) is None for name in ("alibi_slopes", "s_aux", "mask_mod", "dynamic_causal"))
    return (
        plain
        and (window is None or tuple(window) == (-1, -1))
        and not arguments.get("softcap")
        and query.dtype == keys.dtype
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[2] in HEAD_SIZES
        and query.shape[1] // keys.shape[2] <= MOST_QUERY_HEADS
        and keys.stride(3) == 1
        and arguments.get("return_softmax_lse") is not True
    )


def decode(
    query: Tensor, keys: Tensor, values: Tensor, out: Tensor, table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Write softmax(scale * query @ keys^T) @ values of each sequence into `out`, and return it.

    query, out: [B, H, D]; keys, values: [blocks, block size, K, D]; table: [B, ...] block ids; lengths: [B] int32.
    A sequence of length 0 (padding of a captured graph) gives zeros.
    """
    sequences, heads, size = query.shape
    kv_heads = keys.shape[2]
    programs, group = sequences * kv_heads, heads // kv_heads
    shape = shape_for(programs, _shared_memory(query.device))
    parts = parts_for(programs, longest=table.shape[1] * keys.shape[1])
    # Heads on the first grid axis: the heads of one token are adjacent in the cache.
    _decode[(kv_heads, sequences, parts)](
        *(query, keys, values, out, table, lengths),
        *_partial_results(query.device, group, size),
        scale * 1.4426950408889634,  # log2(e): the kernel's exponentials are powers of two
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *out.stride()[:2],
        table.stride(0),
        parts,
        BLOCK=keys.shape[1],
        GROUP=group,
        ROWS=MOST_QUERY_HEADS,
        SIZE=size,
        TILE=min(shape.tile, shape.tile * USUAL_HEAD_SIZE // size),
        LEAST=LEAST_TOKENS,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out


def parts_for(programs: int, longest: int) -> int:
    """Return into how many parts a long sequence is divided.

    Without parts, all sequences would wait for the longest one. But each part that a sequence does not need costs the
    device about half a nanosecond.

    programs: as in `shape_for`. longest: tokens of the longest sequence that the cache may hold.
    """
    return max(1, min(MOST_PARTS, MOST_PROGRAMS // programs, -(-longest // LEAST_TOKENS)))


@cache
def _partial_results(device: torch.device, group: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return memory for the parts of sequences: weighted sums of values, largest scores, masses; and finished parts.

    Never freed, because CUDA graphs contain its address. The kernel leaves the counts of finished parts at zero.
    """
    sums = torch.empty(MOST_PROGRAMS * group, size, device=device)
    tops, masses = torch.empty(2, MOST_PROGRAMS * group, device=device)
    return sums, tops, masses, torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=device)


@cache
def _shared_memory(device: torch.device) -> int:
    if device.type == "cpu":  # Triton's interpreter, in tests
        return FOR_FEW.shared_memory
    utils = triton.runtime.driver.active.utils  # pyrefly: ignore[missing-attribute]  # missing on other drivers
    return utils.get_device_properties(device.index)["max_shared_mem"]


@jit
def _decode(
    query, keys, values, out, table, lengths, sums, tops, masses, finished, scale, query_sequence, query_head,
    key_block, key_token, key_head, value_block, value_token, value_head, out_sequence, out_head, table_sequence, parts,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    length = tl.load(lengths + sequence)
    span = tl.maximum(tl.cdiv(tl.cdiv(length, parts), LEAST), 1) * LEAST
    begin = part * span
    if (begin < length) | (part == 0):
        column = tl.arange(0, SIZE)
        row = tl.arange(0, ROWS)
        real = row[:, None] < GROUP  # tensor cores need at least 16 rows
        heads = (head * GROUP + row)[:, None]
        q = tl.load(query + sequence * query_sequence + heads * query_head + column[None, :], mask=real, other=0.0)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, SIZE], tl.float32)
        lane = tl.arange(0, TILE)
        end = tl.minimum(length, begin + span)
        for start in range(begin, end, TILE):
            position = start + lane
            inside = position < end
            block = tl.load(table + sequence * table_sequence + position // BLOCK, mask=inside, other=0).to(tl.int64)
            token = position % BLOCK
            k_at = block * key_block + token * key_token + head * key_head
            v_at = block * value_block + token * value_token + head * value_head
            k = tl.load(keys + k_at[:, None] + column[None, :], mask=inside[:, None], other=0.0)
            v = tl.load(values + v_at[:, None] + column[None, :], mask=inside[:, None], other=0.0)
            score = tl.where(inside[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            shrink = tl.exp2(top - new_top)
            p = tl.exp2(score - new_top[:, None])
            mass = mass * shrink + tl.sum(p, 1)
            total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v)
            top = new_top
        used = tl.cdiv(length, span)
        last = used <= 1
        if used > 1:
            sequence_head = sequence * tl.num_programs(0) + head
            first = sequence_head * parts
            own = (first + part) * GROUP + row
            tl.store(tops + own, top, mask=row < GROUP)
            tl.store(masses + own, mass, mask=row < GROUP)
            tl.store(sums + own[:, None] * SIZE + column[None, :], total, mask=real)
            tl.debug_barrier()  # all threads have stored before the count is raised
            last = tl.atomic_add(finished + sequence_head, 1) == used - 1
            if last:
                tl.store(finished + sequence_head, 0)
                top = tl.full([ROWS], float("-inf"), tl.float32)
                mass = tl.zeros([ROWS], tl.float32)
                total = tl.zeros([ROWS, SIZE], tl.float32)
                for other in range(used):  # in one order, whichever part was the last
                    at = (first + other) * GROUP + row
                    part_top = tl.load(tops + at, mask=row < GROUP, other=0.0, cache_modifier=".cg")
                    part_mass = tl.load(masses + at, mask=row < GROUP, other=0.0, cache_modifier=".cg")
                    part_sum = tl.load(
                        sums + at[:, None] * SIZE + column[None, :], mask=real, other=0.0, cache_modifier=".cg"
                    )
                    new_top = tl.maximum(top, part_top)
                    shrink, part_shrink = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
                    mass = mass * shrink + part_mass * part_shrink
                    total = total * shrink[:, None] + part_sum * part_shrink[:, None]
                    top = new_top
        if last:
            result = (total / tl.where(mass == 0.0, 1.0, mass)[:, None]).to(out.dtype.element_ty)
            tl.store(out + sequence * out_sequence + heads * out_head + column[None, :], result, mask=real)
