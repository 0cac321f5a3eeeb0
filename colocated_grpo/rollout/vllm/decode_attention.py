"""Triton kernel for one-token attention over the paged KV cache, for batches large enough to fill the device.

A decode step reads the weights once for all sequences, but a separate KV cache for each. With many sequences attention
is limited by the bandwidth of these reads, which an fp8 cache halves. FlashAttention 3 is about as fast for long
sequences, but takes up to 2.7 times as long for many short ones: docs/results/decode_uneven_1xh200.json. With an fp8
cache it is no faster than this kernel with 16 bits: docs/results/fp8_cache_1xh200.json.
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
FP8 = torch.float8_e4m3fn
FP8_RANGE = torch.finfo(FP8)
MOST_PARTS = 8
MOST_PROGRAMS = 16_384
LEAST_TOKENS = 512
"""Fewest tokens of a part."""


class LaunchShape(NamedTuple):
    """Launch settings. One program reads one part of one sequence, for one key-value head."""

    tile: int
    """Tokens per iteration at head size USUAL_HEAD_SIZE; fewer for larger heads."""
    warps: int
    stages: int

    @property
    def shared_memory(self) -> int:
        """Bytes of 16-bit keys and values: one tile is processed while the other stages are read."""
        return self.stages * self.tile * 2 * USUAL_HEAD_SIZE * 2


OPERANDS = ("q", "k", "v", "out", "block_table", "seqused_k", "softmax_scale")
"""Names of the arguments of `decode` in the backend's calls."""
FOR_FEW = LaunchShape(tile=128, warps=4, stages=2)


def shape_for(programs: int, shared_memory: int) -> LaunchShape:
    """Return the fastest shape over even and uneven lengths. With few programs, large tiles keep more reads in flight.

    programs: pairs of a sequence and a key-value head. shared_memory: bytes available to one program; consumer devices
    have too few bytes for FOR_FEW.
    """
    few = programs < 512 and shared_memory >= FOR_FEW.shared_memory
    return FOR_FEW if few else LaunchShape(tile=64, warps=4, stages=2)


def make_attention(vllm_attention: Callable[..., object], count_use: Callable[[], None]) -> Callable[..., object]:
    """Return the backend's `flash_attn_varlen_func` that uses this kernel for supported calls.

    Others go to vLLM's kernel, which needs fp8 queries for an fp8 cache. Install before CUDA graphs are captured.
    """

    def attend(**arguments: Any) -> object:
        if not suits(arguments):
            if arguments["k"].dtype == FP8:
                arguments["q"] = arguments["q"].clamp(FP8_RANGE.min, FP8_RANGE.max).to(FP8)
            return vllm_attention(**arguments)
        count_use()
        scales = (arguments["k_descale"], arguments["v_descale"]) if arguments["k"].dtype == FP8 else None
        return decode(*(arguments[name] for name in OPERANDS), cache_scales=scales)

    return attend


def suits(arguments: dict[str, Any]) -> bool:
    """True for one token of each of many sequences, with plain attention over a 16-bit or fp8 paged cache."""
    query, keys, table = arguments["q"], arguments["k"], arguments.get("block_table")
    if table is None or arguments["max_seqlen_q"] != 1 or len(query) < FEWEST_SEQUENCES or len(query) != len(table):
        return False
    window = arguments.get("window_size")
    plain = all(arguments.get(name) is None for name in ("alibi_slopes", "s_aux", "mask_mod", "dynamic_causal"))
    return (
        plain
        and (window is None or tuple(window) == (-1, -1))
        and not arguments.get("softcap")
        and keys.dtype in (query.dtype, FP8)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[2] in HEAD_SIZES
        and query.shape[1] // keys.shape[2] <= MOST_QUERY_HEADS
        and keys.stride(3) == 1
        and arguments.get("return_softmax_lse") is not True
    )


def decode(
    query: Tensor, keys: Tensor, values: Tensor, out: Tensor, table: Tensor, lengths: Tensor, scale: float,
    cache_scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Write softmax(scale * query @ keys^T) @ values of each sequence into `out`, and return it.

    query, out: [B, H, D]; keys, values: [blocks, block size, K, D]; table: [B, ...] block ids; lengths: [B] int32.
    cache_scales: of keys and values in FP8; the first element of each counts. A sequence of length 0 (padding of a
    captured graph) gives zeros.
    """
    sequences, heads, size = query.shape
    kv_heads = keys.shape[2]
    programs, group = sequences * kv_heads, heads // kv_heads
    shape = shape_for(programs, _shared_memory(query.device))
    parts = parts_for(programs, longest=table.shape[1] * keys.shape[1])
    if cache_scales is not None:
        keys, values = keys.view(torch.uint16), values.view(torch.uint16)  # two numbers in each
    # Heads on the first grid axis: the heads of one token are adjacent in the cache.
    _decode[(kv_heads, sequences, parts)](
        query, keys, values, out, table, lengths, *_partial_results(query.device, group, size),
        *(cache_scales or (query, query)),
        scale * 1.4426950408889634,  # log2(e): the kernel's exponentials are powers of two
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *out.stride()[:2], table.stride(0), parts,
        BLOCK=keys.shape[1], GROUP=group, ROWS=MOST_QUERY_HEADS, SIZE=size,
        TILE=min(shape.tile, shape.tile * USUAL_HEAD_SIZE // size), LEAST=LEAST_TOKENS,
        QUANTIZED=cache_scales is not None, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
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
    """Return memory for parts: weighted sums of values, largest scores, sums of exponentials (masses); finished parts.

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
def _unpacked(pairs):
    """Return the first and the second numbers of pairs in fp8, in float16. The device has an instruction for both.

    Triton's own conversion takes two more instructions for each number, and instructions limit attention here.
    """
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 sorted; .reg .b16 firsts, seconds;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {firsts, seconds}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, firsts;
            cvt.rn.f16x2.e4m3x2 $1, seconds;
        }""",
        "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@jit
def _added(sums, tops, masses, first, used, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Add a sequence's parts in a fixed order, whichever ends last. Returns the weighted sum and the mass."""
    row = tl.arange(0, ROWS)
    real = row < GROUP
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, SIZE], tl.float32)
    for part in range(used):
        at = (first + part) * GROUP + row
        part_top = tl.load(tops + at, mask=real, other=0.0, cache_modifier=".cg")
        part_mass = tl.load(masses + at, mask=real, other=0.0, cache_modifier=".cg")
        cells = at[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        part_sum = tl.load(sums + cells, mask=real[:, None], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, part_top)
        shrink, part_shrink = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        mass = mass * shrink + part_mass * part_shrink
        total = total * shrink[:, None] + part_sum * part_shrink[:, None]
        top = new_top
    return total, mass


@jit
def _decode(
    query, keys, values, out, table, lengths, sums, tops, masses, finished, key_scale, value_scale, scale,
    query_sequence, query_head, key_block, key_token, key_head, value_block, value_token, value_head, out_sequence,
    out_head, table_sequence, parts,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    LEAST: tl.constexpr, QUANTIZED: tl.constexpr,
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
        # Two numbers in fp8 are read as one of 16 bits, so even and odd columns have products of their own.
        read = tl.arange(0, SIZE // 2 if QUANTIZED else SIZE)
        q_even, q_odd = tl.split(q.to(tl.float16).reshape(ROWS, SIZE // 2, 2))
        even = tl.zeros([ROWS, SIZE // 2], tl.float32)
        odd = tl.zeros([ROWS, SIZE // 2], tl.float32)
        if QUANTIZED:
            scale *= tl.load(key_scale)
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
            k = tl.load(keys + k_at[:, None] + read[None, :], mask=inside[:, None], other=0)
            v = tl.load(values + v_at[:, None] + read[None, :], mask=inside[:, None], other=0)
            if QUANTIZED:
                k_even, k_odd = _unpacked(k)
                product = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q_even, tl.trans(k_even)))
            else:
                product = tl.dot(q, tl.trans(k))
            score = tl.where(inside[None, :], product * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            shrink = tl.exp2(top - new_top)
            p = tl.exp2(score - new_top[:, None])
            mass = mass * shrink + tl.sum(p, 1)
            if QUANTIZED:
                v_even, v_odd = _unpacked(v)
                even = even * shrink[:, None] + tl.dot(p.to(tl.float16), v_even)
                odd = odd * shrink[:, None] + tl.dot(p.to(tl.float16), v_odd)
            else:
                total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v)
            top = new_top
        if QUANTIZED:
            total = tl.interleave(even, odd)
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
                total, mass = _added(sums, tops, masses, first, used, GROUP, ROWS, SIZE)
        if last:
            if QUANTIZED:
                total *= tl.load(value_scale)
            result = (total / tl.where(mass == 0.0, 1.0, mass)[:, None]).to(out.dtype.element_ty)
            tl.store(out + sequence * out_sequence + heads * out_head + column[None, :], result, mask=real)
