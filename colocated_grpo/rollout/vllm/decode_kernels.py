"""Triton kernels of `decode_attention`.

The rows of a program are the query heads that use one key-value head: those of one sequence (`decode_own`) or of
several siblings (`decode_prefix`). Each program reads a part of the tokens. A row's results are the largest score, the
sum of exponentials (mass), and the weighted sum of values.
"""

import triton.language as tl

from colocated_grpo.runtime.row_attention import added, combined, load_part, nothing, store_part
from colocated_grpo.runtime.triton_jit import jit


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
def _span(tokens, parts, LEAST: tl.constexpr):
    """Return the number of tokens of a part."""
    return tl.maximum(tl.cdiv(tl.cdiv(tokens, parts), LEAST), 1) * LEAST


@jit
def _read(
    q, keys, values, blocks, begin, end, head, scale,
    key_block, key_token, key_head, value_block, value_token, value_head,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Read the tokens from `begin` to `end`. Returns each row's largest score, mass and weighted sum.

    blocks: pointer to the id of the block with token 0.
    """
    top, mass, total = nothing(ROWS, SIZE)
    lane = tl.arange(0, TILE)
    # Two numbers in fp8 are read as one of 16 bits, so even and odd columns have products of their own.
    read = tl.arange(0, SIZE // 2 if QUANTIZED else SIZE)
    q_even, q_odd = tl.split(q.to(tl.float16).reshape(ROWS, SIZE // 2, 2))
    even, odd = tl.split(total.reshape(ROWS, SIZE // 2, 2))
    for start in range(begin, end, TILE):
        position = start + lane
        inside = position < end
        block = tl.load(blocks + position // BLOCK, mask=inside, other=0).to(tl.int64)
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
    return top, mass, total


@jit
def decode_prefix(
    query, keys, values, table, firsts, counts, prefix_tokens, num_sets, sums, tops, masses, finished, key_scale, scale,
    query_sequence, query_head, key_block, key_token, key_head, value_block, value_token, value_head, table_sequence,
    parts,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    LEAST: tl.constexpr, QUANTIZED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Read the tokens that siblings have in common. Each one's results are stored in the place of its first part.

    parts: of `decode_own`, which reads these results. There may be fewer here.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    part = tl.program_id(2)
    if tl.program_id(1) < tl.load(num_sets):
        first = tl.load(firsts + tl.program_id(1)).to(tl.int64)
        prefix = tl.multiple_of(tl.load(prefix_tokens + first), BLOCK)
        span = _span(prefix, tl.num_programs(2), LEAST)
        begin = part * span
        if begin < prefix:
            row = tl.arange(0, ROWS)
            real = row < GROUP * tl.load(counts + first)
            sequence = first + row // GROUP
            heads = head * GROUP + row % GROUP
            q_at = sequence * query_sequence + heads * query_head
            q = tl.load(query + q_at[:, None] + tl.arange(0, SIZE)[None, :], mask=real[:, None], other=0.0)
            if QUANTIZED:
                scale *= tl.load(key_scale)
            top, mass, total = _read(
                q, keys, values, table + first * table_sequence, begin, tl.minimum(prefix, begin + span), head, scale,
                key_block, key_token, key_head, value_block, value_token, value_head,
                BLOCK, ROWS, SIZE, TILE, QUANTIZED,
            )  # fmt: skip
            place = (sequence * tl.num_programs(0) + head) * parts * GROUP + row % GROUP
            store_part(sums, tops, masses, place + part * GROUP, top, mass, total, real, SIZE)
            used = tl.cdiv(prefix, span)
            if used > 1:
                tl.debug_barrier()  # all threads have stored before the count is raised
                counter = finished + first * tl.num_programs(0) + head
                if tl.atomic_add(counter, 1) == used - 1:
                    tl.store(counter, 0)
                    top, mass, total = added(sums, tops, masses, place, GROUP, used, real, ROWS, SIZE)
                    tl.debug_barrier()  # all threads have read the first part
                    store_part(sums, tops, masses, place, top, mass, total, real, SIZE)


@jit
def decode_own(
    query, keys, values, out, table, lengths, prefix_tokens, prefix_sums, prefix_tops, prefix_masses,
    sums, tops, masses, finished, key_scale, value_scale, scale,
    query_sequence, query_head, key_block, key_token, key_head, value_block, value_token, value_head, table_sequence,
    out_sequence, out_head, parts,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    LEAST: tl.constexpr, QUANTIZED: tl.constexpr, HAS_PREFIX: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Read each sequence's own tokens, and add the results of `decode_prefix` to those of the first part."""
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    prefix = tl.multiple_of(tl.load(prefix_tokens + sequence), BLOCK) if HAS_PREFIX else 0
    length = tl.load(lengths + sequence) - prefix
    span = _span(length, parts, LEAST)
    begin = part * span
    if (begin < length) | (part == 0):
        column = tl.arange(0, SIZE)
        row = tl.arange(0, ROWS)
        real = row < GROUP  # tensor cores need at least 16 rows
        heads = (head * GROUP + row)[:, None]
        q_at = query + sequence * query_sequence + heads * query_head + column[None, :]
        q = tl.load(q_at, mask=real[:, None], other=0.0)
        if QUANTIZED:
            scale *= tl.load(key_scale)
        # The same as `real` where it is used. But if it is computed there, the kernel needs 106 registers instead of 93
        # (heads of 128), and only four programs fit on a multiprocessor instead of five.
        with_prefix = row < tl.where((part == 0) & (prefix > 0), GROUP, 0)
        top, mass, total = _read(
            q, keys, values, table + sequence * table_sequence + prefix // BLOCK, begin,
            tl.minimum(length, begin + span), head, scale,
            key_block, key_token, key_head, value_block, value_token, value_head, BLOCK, ROWS, SIZE, TILE, QUANTIZED,
        )  # fmt: skip
        first_place = (sequence * tl.num_programs(0) + head) * parts * GROUP + row
        if HAS_PREFIX and (part == 0) & (prefix > 0):
            if OVERLAPS:
                # Without siblings, `decode_prefix` writes nothing, so there is nothing to wait for. The next layer's
                # `decode_prefix` is no dependent launch: it starts after this kernel has ended.
                tl.extra.cuda.gdc_wait()
            top, mass, total = combined(
                top, mass, total, *load_part(prefix_sums, prefix_tops, prefix_masses, first_place, with_prefix, SIZE)
            )
        used = tl.cdiv(length, span)
        last = used <= 1
        if used > 1:
            store_part(sums, tops, masses, first_place + part * GROUP, top, mass, total, real, SIZE)
            tl.debug_barrier()  # all threads have stored before the count is raised
            counter = finished + sequence * tl.num_programs(0) + head
            last = tl.atomic_add(counter, 1) == used - 1
            if last:
                tl.store(counter, 0)
                top, mass, total = added(sums, tops, masses, first_place, GROUP, used, real, ROWS, SIZE)
        if last:
            if QUANTIZED:
                total *= tl.load(value_scale)
            result = (total / tl.where(mass == 0.0, 1.0, mass)[:, None]).to(out.dtype.element_ty)
            tl.store(out + sequence * out_sequence + heads * out_head + column[None, :], result, mask=real[:, None])
