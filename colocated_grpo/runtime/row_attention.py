"""Attention in one order of summation, for `numerics: exact` on GPUs: a kernel for training, prompts and decode steps.

Keys are read in tiles, and tiles belong to parts; both are counted from a sequence's first key. A part is summed tile
by tile, and parts are added in order, whether one program reads them all or each part has a program of its own. Keys
that a query does not see add zeros. So an output depends neither on the queries that share a program, nor on the batch.
The sum of exponentials (mass) is a matrix product with ones: the order of `tl.sum` depends on the tile's layout.

Shapes: T queries, E packed keys, N runs of queries, B pages of a run, H query heads, K key-value heads, D head size.
The last query of a run sees all keys of the run.
"""

from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocated_grpo.runtime.triton_jit import jit

PART = 512
"""Keys of a part."""
LOG2_E = tl.constexpr(1.4426950408889634)
"""Scores are multiplied by it, because kernels compute powers of two."""
PartMemory = tuple[Tensor, Tensor, Tensor, Tensor]


def attend_packed(
    query_THD: Tensor, key_EKD: Tensor, value_EKD: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int,
    scale: float, left: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return causal attention of each run, [T, H, D], and the logsumexps [H, T] in float32.

    cu_q, cu_k: [N + 1] int32. longest_q: at least the queries of each run. left: earlier keys that a query sees, -1 for
    all. D must be a power of two.
    """
    out = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
    logsumexp_HT = query_THD.new_empty(out.shape[1], len(out), dtype=torch.float32)
    keys = key_EKD[None], value_EKD[None]
    _launch(query_THD, *keys, out, logsumexp_HT, cu_q, cu_k, None, longest_q, scale, left)
    return out, logsumexp_HT


def attend_pages(
    query_THD: Tensor, keys: Tensor, values: Tensor, out_THD: Tensor, cu_q: Tensor, lengths_N: Tensor, table_NB: Tensor,
    longest_q: int, scale: float, left: int,
) -> Tensor:  # fmt: skip
    """Write the output of `attend_packed` into `out_THD`, for keys in pages, and return it. Padded queries keep theirs.

    keys, values: [pages, keys of a page, K, D]. lengths_N: keys of each run, int32. table_NB: its pages. Pages before
    the window are not read.
    """
    _launch(query_THD, keys, values, out_THD, None, cu_q, lengths_N, table_NB, longest_q, scale, left)
    return out_THD


def _launch(
    query: Tensor, keys: Tensor, values: Tensor, out: Tensor, logsumexp: Tensor | None,
    cu_q: Tensor, key_counts: Tensor, table: Tensor | None, longest_q: int, scale: float, left: int,
) -> None:  # fmt: skip
    heads, size = query.shape[1:]
    kv_heads, runs = keys.shape[2], len(cu_q) - 1
    assert query.stride(2) == keys.stride(3) == values.stride(3) == out.stride(2) == 1
    group, single = heads // kv_heads, longest_q == 1 and table is not None
    rows = max(16 if single else 64, triton.next_power_of_2(group))
    most_keys = 1 if table is None else table.shape[1] * keys.shape[1]
    programs = triton.cdiv(most_keys, PART) if single else triton.cdiv(longest_q, rows // group)
    memory = part_memory(query.device, runs * kv_heads * programs if single else 1, group, size, "own")
    _attend[(kv_heads, runs, programs)](
        query, keys, values, out, out if logsumexp is None else logsumexp, cu_q, key_counts,
        cu_q if table is None else table, *memory, scale * LOG2_E.value, left, len(query),
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *out.stride()[:2],
        0 if table is None else table.stride(0),
        GROUP=group, ROWS=rows, SIZE=size, TILE=64 if size <= 128 else 32, PART=PART,
        PAGE=0 if table is None else keys.shape[1], HAS_WINDOW=left >= 0, SINGLE=single,
        LOGSUMEXP=logsumexp is not None, num_warps=4 if single or size <= 128 else 8, num_stages=2,
        # A product and a sum in one instruction skip a rounding. Each variant of the kernel would combine other pairs.
        enable_fp_fusion=False,
    )  # fmt: skip


@cache
def _memories(_device: torch.device, _group: int, _size: int, _kind: str) -> list[PartMemory]:
    return []


def part_memory(device: torch.device, parts: int, group: int, size: int, kind: str) -> PartMemory:
    """Return memory for parts: weighted sums of values, largest scores, masses; numbers of finished parts.

    Never freed, because CUDA graphs contain its address; vLLM captures the largest graph first. The kernels leave the
    numbers at zero. kind: memories of different kinds are used at the same time.
    """
    kept = _memories(device, group, size, kind)
    if not kept or len(kept[-1][-1]) < parts:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("attention: no call before the capture of a CUDA graph, whose replays would zero memory")
        tops, masses = torch.empty(2, parts * group, device=device)
        finished = torch.zeros(parts, dtype=torch.int32, device=device)
        kept.append((torch.empty(parts * group, size, device=device), tops, masses, finished))
    return kept[-1]


@jit
def nothing(ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return largest score, mass and weighted sum of no keys. The score is finite: -inf minus -inf is NaN."""
    return tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, SIZE], tl.float32)


@jit
def combined(top, mass, total, other_top, other_mass, other_total):
    """Return the results of two sets of keys together."""
    new_top = tl.maximum(top, other_top)
    shrink, other_shrink = tl.exp2(top - new_top), tl.exp2(other_top - new_top)
    total = total * shrink[:, None] + other_total * other_shrink[:, None]
    return new_top, mass * shrink + other_mass * other_shrink, total


@jit
def added(sums, tops, masses, place, step, used, real, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Add the `used` parts of each row in a fixed order, whichever ended last.

    place: [ROWS] index of each row's first part; step: distance to its next part.
    """
    top, mass, total = nothing(ROWS, SIZE)
    for _ in range(used):
        top, mass, total = combined(top, mass, total, *load_part(sums, tops, masses, place, real, SIZE))
        place += step
    return top, mass, total


@jit
def load_part(sums, tops, masses, place, real, SIZE: tl.constexpr):
    top = tl.load(tops + place, mask=real, other=0.0, cache_modifier=".cg")
    mass = tl.load(masses + place, mask=real, other=0.0, cache_modifier=".cg")
    cells = place[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    return top, mass, tl.load(sums + cells, mask=real[:, None], other=0.0, cache_modifier=".cg")


@jit
def store_part(sums, tops, masses, place, top, mass, total, real, SIZE: tl.constexpr):
    tl.store(tops + place, top, mask=real)
    tl.store(masses + place, mass, mask=real)
    tl.store(sums + place[:, None] * SIZE + tl.arange(0, SIZE)[None, :], total, mask=real[:, None])


@jit
def _read(
    q, position, keys, values, pages, begin, whole, end, oldest, scale, left,
    key_page, key_token, value_page, value_token,
    ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the results of the keys from `begin` to `end`, of the same part.

    position: of the only query, or of each row, [ROWS, 1]. whole: tiles before this key need no mask. oldest: first key
    that any row sees. Pages before it may have been freed, and hold NaN.
    """
    top, _, total = nothing(ROWS, SIZE)
    masses = tl.zeros([ROWS, 16], tl.float32)
    for start in range(begin, whole, TILE):
        top, masses, total = _add_tile(
            q, position, keys, values, pages, start, end, oldest, scale, left,
            key_page, key_token, value_page, value_token, top, masses, total, SIZE, TILE, PAGE, HAS_WINDOW, False,
        )  # fmt: skip
    for start in range(whole, end, TILE):
        top, masses, total = _add_tile(
            q, position, keys, values, pages, start, end, oldest, scale, left,
            key_page, key_token, value_page, value_token, top, masses, total, SIZE, TILE, PAGE, HAS_WINDOW, True,
        )  # fmt: skip
    return top, tl.max(masses, 1), total


@jit
def _add_tile(
    q, position, keys, values, pages, start, end, oldest, scale, left,
    key_page, key_token, value_page, value_token, top, masses, total,
    SIZE: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    place = start + tl.arange(0, TILE)
    inside = (place < end) & (place >= oldest) if HAS_WINDOW else place < end
    if PAGE > 0:
        page = tl.load(pages + place // PAGE, mask=inside, other=0).to(tl.int64)
        k_at, v_at = page * key_page + place % PAGE * key_token, page * value_page + place % PAGE * value_token
    else:
        k_at, v_at = place * key_token, place * value_token
    column = tl.arange(0, SIZE)[None, :]
    k_from, v_from = keys + k_at[:, None] + column, values + v_at[:, None] + column
    if MASKED:
        k = tl.load(k_from, mask=inside[:, None], other=0.0)
        v = tl.load(v_from, mask=inside[:, None], other=0.0)
    else:
        k, v = tl.load(k_from), tl.load(v_from)
    score = tl.dot(q, tl.trans(k)) * scale
    if MASKED:
        seen = place[None, :] <= position
        if HAS_WINDOW:
            seen = seen & (place[None, :] >= position - left)
        score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    shrink = tl.exp2(top - new_top)[:, None]
    p = tl.exp2(score - new_top[:, None]).to(v.dtype)
    masses = tl.dot(p, tl.full([TILE, 16], 1.0, v.dtype), masses * shrink)
    return new_top, masses, tl.dot(p, v, total * shrink)


@partial(jit, do_not_specialize=["left", "tokens"])
def _attend(
    query, keys, values, out, logsumexps, cu_q, key_counts, table, sums, tops, masses, finished, scale, left, tokens,
    query_token, query_head, key_page, key_token, key_head, value_page, value_token, value_head, out_token, out_head,
    table_run,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
    PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr, SINGLE: tl.constexpr, LOGSUMEXP: tl.constexpr,
):  # fmt: skip
    """One program computes the heads of one key-value head for consecutive queries of a run.

    PAGE: keys of a page, 0 for packed keys. SINGLE: each run has one query, and each of its parts has a program.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    head, run, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    # The last queries see most keys: their programs begin first.
    first = 0 if SINGLE else (tl.num_programs(2) - 1 - part) * QUERIES
    start = tl.load(cu_q + run)
    queries = tl.load(cu_q + run + 1) - start
    length = tl.load(key_counts + run)
    if PAGE == 0:
        before = length.to(tl.int64)
        length = tl.load(key_counts + run + 1) - length
        keys += before * key_token
        values += before * value_token
    is_needed = first < queries
    if SINGLE:
        is_needed = is_needed & (part * PART < length)
    if is_needed:
        row, column = tl.arange(0, ROWS), tl.arange(0, SIZE)[None, :]
        own = first + row // GROUP
        real = (row < QUERIES * GROUP) & (own < queries)
        heads, token = head * GROUP + row % GROUP, (start + own).to(tl.int64)
        q_at = query + token * query_token + heads * query_head
        q = tl.load(q_at[:, None] + column, mask=real[:, None], other=0.0)
        keys += head * key_head
        values += head * value_head
        earlier = length - queries
        end = earlier + tl.minimum(first + QUERIES, queries)
        oldest = tl.maximum(earlier + first - left, 0) if HAS_WINDOW else 0
        low = oldest // TILE * TILE
        pages = table + run * table_run
        used = tl.cdiv(end, PART)
        done = used > 0
        if SINGLE:
            begin, stop = tl.maximum(part * PART, low), tl.minimum(part * PART + PART, end)
            top, mass, total = _read(
                q, end - 1, keys, values, pages, begin, begin, stop, oldest, scale, left,
                key_page, key_token, value_page, value_token, ROWS, SIZE, TILE, PAGE, HAS_WINDOW,
            )  # fmt: skip
            if used > 1:
                number = run * tl.num_programs(0) + head
                place = number * tl.num_programs(2) * GROUP + row
                store_part(sums, tops, masses, place + part * GROUP, top, mass, total, real, SIZE)
                tl.debug_barrier()  # all threads have stored before the count is raised
                done = tl.atomic_add(finished + number, 1) == used - 1
                if done:
                    tl.store(finished + number, 0)
                    top, mass, total = added(sums, tops, masses, place, GROUP, used, real, ROWS, SIZE)
        else:
            top, mass, total = nothing(ROWS, SIZE)
            for begin_of_part in range(low // PART * PART, end, PART):
                begin, stop = tl.maximum(begin_of_part, low), tl.minimum(begin_of_part + PART, end)
                seen = 0 if HAS_WINDOW else tl.minimum(earlier + first + 1, stop) - begin
                more = _read(
                    q, (earlier + own)[:, None], keys, values, pages, begin,
                    begin + tl.maximum(seen, 0) // TILE * TILE, stop, oldest, scale, left,
                    key_page, key_token, value_page, value_token, ROWS, SIZE, TILE, PAGE, HAS_WINDOW,
                )  # fmt: skip
                top, mass, total = combined(top, mass, total, *more)
        if done:
            mass = tl.where(real, mass, 1.0)
            out_at = out + token * out_token + heads * out_head
            tl.store(out_at[:, None] + column, (total / mass[:, None]).to(out.dtype.element_ty), mask=real[:, None])
            if LOGSUMEXP:
                tl.store(logsumexps + heads * tokens + token, (top + tl.log2(mass)) / LOG2_E, mask=real)
