"""One-token attention over the paged KV cache in Triton, for batches large enough to fill the device.

A decode step reads the weights once for all sequences, but a separate KV cache for each. With many sequences attention
is limited by the bandwidth of these reads, which an fp8 cache halves. FlashAttention 3 is about as fast for long
sequences, but takes up to 2.7 times as long for many short ones: docs/results/decode_uneven_1xh200.json. With an fp8
cache it is no faster than these kernels with 16 bits: docs/results/fp8_cache_1xh200.json. `decode_prefix` reads the
whole blocks of a prompt once for several of its completions.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from colocated_grpo.rollout.vllm.decode_kernels import decode_own, decode_prefix
from colocated_grpo.rollout.vllm.siblings import Siblings, SiblingsOfStep
from colocated_grpo.runtime.row_attention import LOG2_E, part_memory

FEWEST_SEQUENCES = 32
HEAD_SIZES = (64, 128, 256)
USUAL_HEAD_SIZE = 128
MOST_QUERY_HEADS = 16
"""Largest number of query heads per key-value head. A tile has this many rows: heads of a sequence or of siblings."""
LEAST_WIDTH = 512
"""Smallest product of key-value heads and head size for which `decode_prefix` is launched. With short prompts it costs
SmolLM2 (192) more than it saves; with long ones it saves most for 1,024: docs/results/decode_siblings_1xh200.json."""
FP8 = torch.float8_e4m3fn
FP8_RANGE = torch.finfo(FP8)
MOST_PARTS = 8
MOST_PROGRAMS = 16_384
MOST_PREFIX_PROGRAMS = 2048
"""Programs of `decode_prefix` for which a prefix is divided into several parts. Most programs do nothing, because the
number of sets is known only on the device."""
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
    """Return the backend's `flash_attn_varlen_func` that uses these kernels for supported calls.

    Others go to vLLM's kernel, which needs fp8 queries for an fp8 cache. Install before CUDA graphs are captured.
    """
    siblings_of_step = SiblingsOfStep()

    def attend(**arguments: Any) -> object:
        if not suits(arguments):
            if arguments["k"].dtype == FP8:
                arguments["q"] = arguments["q"].clamp(FP8_RANGE.min, FP8_RANGE.max).to(FP8)
            return vllm_attention(**arguments)
        count_use()
        scales = (arguments["k_descale"], arguments["v_descale"]) if arguments["k"].dtype == FP8 else None
        query, keys, values, out, table, lengths, scale = (arguments[name] for name in OPERANDS)
        most = most_siblings(query, keys)
        siblings = siblings_of_step.of(keys, table, lengths, most) if most > 1 else None
        return decode(query, keys, values, out, table, lengths, scale, siblings, scales)

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
    siblings: Siblings | None, cache_scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Write softmax(scale * query @ keys^T) @ values of each sequence into `out`, and return it.

    query, out: [B, H, D]; keys, values: [blocks, block size, K, D]; table: [B, ...] block ids; lengths: [B] int32.
    siblings: in groups of at most `most_siblings`; None: each sequence is read separately. cache_scales: of keys and
    values in FP8; the first element of each counts. A sequence of length 0 (padding of a captured graph) gives zeros.
    """
    sequences, heads, size = query.shape
    kv_heads = keys.shape[2]
    programs, group = sequences * kv_heads, heads // kv_heads
    shape = shape_for(programs, _shared_memory(query.device))
    parts = parts_for(programs, longest=table.shape[1] * keys.shape[1])
    if cache_scales is not None:
        keys, values = keys.view(torch.uint16), values.view(torch.uint16)  # two numbers in each
    key_scale, value_scale = cache_scales or (query, query)
    scale *= LOG2_E.value
    strides = *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], table.stride(0)
    grid = kv_heads, sequences, parts  # heads first: the heads of one token are adjacent in the cache
    options = {
        "BLOCK": keys.shape[1], "GROUP": group, "SIZE": size, "QUANTIZED": cache_scales is not None,
        "TILE": min(shape.tile, shape.tile * USUAL_HEAD_SIZE // size), "num_warps": shape.warps,
        "num_stages": shape.stages, "ROWS": MOST_QUERY_HEADS, "LEAST": LEAST_TOKENS,
    }  # fmt: skip
    own = part_memory(query.device, MOST_PROGRAMS, group, size, "own")
    prefix_tokens, prefix, overlaps = lengths, own[:3], False  # pointers that are not read
    if siblings is not None:
        prefix_tokens, overlaps = siblings.tokens, _can_overlap(query.device)
        *prefix, finished = part_memory(query.device, MOST_PROGRAMS, group, size, "prefix")
        most_sets = max(1, sequences // 2)
        decode_prefix[kv_heads, most_sets, min(parts, prefix_parts_for(most_sets * kv_heads))](
            query, keys, values, table, *siblings, *prefix, finished, key_scale, scale, *strides, parts,
            OVERLAPS=overlaps, **options,
        )  # fmt: skip
    decode_own[grid](
        query, keys, values, out, table, lengths, prefix_tokens, *prefix, *own, key_scale, value_scale, scale, *strides,
        *out.stride()[:2], parts, HAS_PREFIX=siblings is not None, OVERLAPS=overlaps,
        launch_pdl=overlaps, **options,
    )  # fmt: skip
    return out


def most_siblings(query: Tensor, keys: Tensor) -> int:
    """Return how many siblings `decode_prefix` reads together; 1: it is not launched. Arguments: see `decode`."""
    sequences, heads, size = query.shape
    kv_heads = keys.shape[2]
    if kv_heads * size < LEAST_WIDTH or sequences * kv_heads > MOST_PROGRAMS:  # no memory for their results
        return 1
    return MOST_QUERY_HEADS * kv_heads // heads


def parts_for(programs: int, longest: int) -> int:
    """Return into how many parts a long sequence is divided.

    Without parts, all sequences would wait for the longest one. But each part that a sequence does not need costs the
    device about half a nanosecond.

    programs: as in `shape_for`. longest: tokens of the longest sequence that the cache may hold.
    """
    return max(1, min(MOST_PARTS, MOST_PROGRAMS // programs, -(-longest // LEAST_TOKENS)))


def prefix_parts_for(programs: int) -> int:
    """Return into how many parts a long prefix is divided. programs: pairs of a possible set and a key-value head."""
    return max(1, MOST_PREFIX_PROGRAMS // programs)


@cache
def _can_overlap(device: torch.device) -> bool:
    """Return True if a kernel can start before the previous one has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _shared_memory(device: torch.device) -> int:
    if device.type == "cpu":  # Triton's interpreter, in tests
        return FOR_FEW.shared_memory
    utils = triton.runtime.driver.active.utils  # pyrefly: ignore[missing-attribute]  # missing on other drivers
    return utils.get_device_properties(device.index)["max_shared_mem"]
