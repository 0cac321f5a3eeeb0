"""Expected results of the decode kernels, for any device: CUDA, or the CPU by Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so the interpreter has a process of its own: it runs this
file, which checks small cases.
"""

from __future__ import annotations

from functools import partial

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope

from colocated_grpo.rollout.vllm import decode_attention
from colocated_grpo.rollout.vllm import siblings as sibling_kernel
from colocated_grpo.rollout.vllm.decode_attention import FP8, LEAST_TOKENS, decode, most_siblings
from colocated_grpo.rollout.vllm.qkv_kernel import Cache, normalize_rotate_and_store, suits
from colocated_grpo.rollout.vllm.sampling_kernels import Inputs, Requests, advance
from colocated_grpo.runtime import logit_kernels
from colocated_grpo.runtime.logit_kernels import sample

LENGTHS = [1, 15, 16, 17, 64, 200, LEAST_TOKENS + 1, 0]
"""Only the last but one is divided into parts."""
BLOCK = 16
LEAST_BLOCKS = sibling_kernel.LEAST_COMMON_TOKENS // BLOCK
GROUPS = [(2, 100), (3, LEAST_BLOCKS * BLOCK), (11, LEAST_TOKENS + 100), (2, (LEAST_BLOCKS - 1) * BLOCK)]
"""Siblings and prompt tokens of groups. The last prompt is too short to be read once for both siblings."""


Scales = tuple[float, float] | None
"""Scales of keys and values of a cache in fp8. None: 16 bits."""


def in_cache(cache: torch.Tensor, scales: Scales) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The numbers as the cache keeps them, and the scales as the kernels read them."""
    if scales is None:
        return cache, None
    key_scale, value_scale = (torch.tensor(scale, device=cache.device) for scale in scales)
    return cache.to(FP8), (key_scale, value_scale)


def assert_attention_is_softmax(
    device: str,
    sequences: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype = torch.bfloat16,
    cache_scales: Scales = None,
) -> None:
    """One-token attention over the paged cache equals softmax over the sequence. Siblings' prompts are read once."""
    lengths = LENGTHS * (sequences // len(LENGTHS))
    groups = {}
    """Blocks of the prompt, by the row of the first sibling and the number of siblings."""
    for count, prompt in GROUPS:
        groups[len(lengths), count] = prompt // BLOCK
        lengths += [prompt + 1 + 60 * sibling for sibling in range(count)]
    lengths += [0, 0]  # of a captured graph: their blocks are the same
    generator = torch.Generator(device).manual_seed(0)
    blocks = [-(-length // BLOCK) for length in lengths]
    cache = torch.randn(sum(blocks), BLOCK, kv_heads, 2 * head_size, device=device, generator=generator).to(dtype)
    cache, scales = in_cache(cache, cache_scales)
    keys, values = cache[..., :head_size], cache[..., head_size:]
    order = torch.randperm(sum(blocks), device=device, generator=generator).int()
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device=device)
    for row, ids in enumerate(order.split(blocks)):
        table[row, : len(ids)] = ids
    for (first, count), shared in groups.items():
        table[first : first + count, :shared] = table[first, :shared].clone()
    query = torch.randn(len(lengths), heads, head_size, device=device, generator=generator).to(dtype)
    out = torch.full_like(query, float("nan"))
    lengths_B = torch.tensor(lengths, dtype=torch.int32, device=device)
    most = most_siblings(query, keys)
    siblings = sibling_kernel.find_siblings(table, lengths_B, BLOCK, most) if most > 1 else None
    once, leaders = table.clone(), []
    for (first, count), shared in groups.items() if siblings else ():
        for leader in range(first, first + count, most):
            together = min(most, first + count - leader)
            has_siblings = shared >= LEAST_BLOCKS and together > 1
            rows = slice(leader, leader + together)
            assert (siblings.tokens[rows] == (shared * BLOCK if has_siblings else 0)).all()
            assert (siblings.counts[rows] == (together if has_siblings else 1)).all()
            if has_siblings:
                leaders.append(leader)
                once[leader + 1 : leader + together, :shared] = order[-1]  # must not be read
    if siblings:
        assert siblings.firsts[: int(siblings.num_sets)].tolist() == leaders
    decode(query, keys, values, out, once, lengths_B, head_size**-0.5, siblings, scales)
    again = torch.full_like(out, float("nan"))
    assert torch.equal(decode(query, keys, values, again, table, lengths_B, head_size**-0.5, siblings, scales), out)
    key_scale, value_scale = cache_scales or (1.0, 1.0)
    for row, length in enumerate(lengths):
        own = table[row].long()
        k, v = (
            part.float()[own].flatten(0, 1)[:length].double().repeat_interleave(heads // kv_heads, 1) * scale
            for part, scale in ((keys, key_scale), (values, value_scale))
        )
        weights = torch.softmax(torch.einsum("hd,thd->ht", query[row].double(), k) * head_size**-0.5, -1)
        expected = torch.einsum("ht,thd->hd", weights, v)
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=0.03 if dtype == torch.bfloat16 else 0.004)


def rows_of(device: str, count: int, temperature: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Places, temperatures, seeds and positions of as many sequences; places are not in order."""
    places = torch.arange(count - 1, -1, -1, dtype=torch.int32, device=device)
    temperatures = torch.full((count,), temperature, device=device)
    seeds = torch.arange(1000, 1000 + count, dtype=torch.int64, device=device)
    return places, temperatures, seeds, torch.full((count,), 7, dtype=torch.int64, device=device)


def assert_samples_are_sound(device: str, rows: int, vocabulary: int, dtype: torch.dtype, allowed: int = 40) -> None:
    """Sampling also gives log-probabilities, and never a forbidden token."""
    generator = torch.Generator(device).manual_seed(0)
    logits = 4 * torch.randn(rows, vocabulary, device=device, generator=generator).to(dtype)
    logits[:, allowed:] = float("-inf")
    for temperature, divide in ((1.0, False), (0.7, True), (0.0, True)):
        tokens, logprobs = sample(logits, *rows_of(device, rows, temperature), divide=divide)
        assert int(tokens.max()) < allowed
        expected = torch.log_softmax(logits.double() / (temperature or 1.0), -1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-4)


def assert_greedy_takes_the_likeliest(device: str) -> None:
    """Without temperature the likeliest token is taken."""
    logits = torch.randn(5, 20011, device=device, generator=torch.Generator(device).manual_seed(0))
    tokens, _ = sample(logits, *rows_of(device, 5, temperature=0.0))
    assert torch.equal(tokens, logits.argmax(-1))


def small_attention(generator: torch.Generator, heads: int, kv_heads: int, size: int) -> torch.nn.Module:
    """Return what `qkv_kernel` reads of an attention module of vLLM, with random norms."""
    attention, device = torch.nn.Module(), generator.device
    attention.num_heads, attention.num_kv_heads, attention.head_dim = heads, kv_heads, size
    with set_current_vllm_config(VllmConfig()), device:
        attention.q_norm, attention.k_norm = (RMSNorm(size, eps=1e-6, dtype=torch.bfloat16) for _ in range(2))
        rope = {"rope_type": "default", "rope_theta": 1e6}
        attention.rotary_emb = get_rope(size, max_position=4096, rope_parameters=rope, dtype=torch.bfloat16)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.data.normal_(1.0, 0.2, generator=generator)
    return attention


def assert_prepared_as_by_separate_layers(
    device: str, heads: int, kv_heads: int, size: int, cache_scales: Scales = None
) -> None:
    """Queries, keys and values are prepared as by separate layers."""
    generator = torch.Generator(device).manual_seed(0)
    attention, tokens, padding = small_attention(generator, heads, kv_heads, size), 37, 3
    positions = torch.randint(0, 4096, (tokens,), device=device, generator=generator)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=device, generator=generator).bfloat16()
    assert suits(attention, positions, qkv)
    parts = heads * size, kv_heads * size, kv_heads * size
    q, k, v = (part.double().view(tokens, -1, size) for part in qkv.split(parts, dim=-1))
    # vLLM's default layout: tokens of a block before heads.
    blocks = torch.full((6, BLOCK, kv_heads, 2 * size), 7.0, device=device, dtype=torch.bfloat16).transpose(1, 2)
    slots = torch.randperm(6 * BLOCK, device=device, generator=generator)[: tokens - padding]
    slots[4] = -1
    key_scale, value_scale = cache_scales or (1.0, 1.0)
    blocks, scales = in_cache(blocks, cache_scales)
    normalize_rotate_and_store(attention, qkv, positions, Cache(blocks, slots, scales))

    def expected(x, norm):
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
        angles = positions[:, None, None] * 1e6 ** (-torch.arange(0, size, 2, device=device).double() / size)
        left, right = x.chunk(2, -1)
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)

    rotated = qkv.split(parts, dim=-1)[0].double().view(tokens, -1, size)
    torch.testing.assert_close(rotated, expected(q, attention.q_norm), rtol=0.02, atol=0.03)
    cached = blocks.float().transpose(1, 2).flatten(0, 1).double()
    written = slots >= 0
    keys, values = cached[slots[written]].split(size, dim=-1)
    there = written.nonzero()[:, 0]
    rounding = 2**-4 if cache_scales else 0.02
    torch.testing.assert_close(keys * key_scale, expected(k, attention.k_norm)[there], rtol=rounding, atol=0.03)
    stored = (v[there] / value_scale).float().to(blocks.dtype).double()
    assert torch.equal(values, stored)
    assert int((cached == 7.0).all(-1).all(-1).sum()) == len(cached) - len(there), "wrote where nothing belongs"


def chi_squared_of_draws(device: str, vocabulary: int, likely: list[int], draws: int, rows: int) -> float:
    """Check the drawn tokens, `rows` at a time, against softmax: only likely tokens may be drawn."""
    tokens = torch.tensor(likely, device=device)
    logits = torch.full((vocabulary,), -30.0, device=device)
    logits[tokens] = torch.linspace(-2.0, 1.0, len(likely), device=device)
    counts = torch.zeros(vocabulary, device=device)
    for batch in range(draws // rows):
        places, temperatures, seeds, positions = rows_of(device, rows)
        drawn, _ = sample(logits.expand(rows, -1), places, temperatures, seeds, positions + batch)
        counts += torch.bincount(drawn, minlength=vocabulary)
    assert int(counts[tokens].sum()) == draws
    expected = draws * torch.softmax(logits.double(), -1)[tokens]
    return float(((counts[tokens] - expected) ** 2 / expected).sum())


def assert_sampled_tokens_are_the_next_inputs(device: str) -> None:
    """Requests 2 and 0 of three sample a token each."""
    whole = partial(torch.tensor, dtype=torch.int32, device=device)
    long = partial(torch.tensor, dtype=torch.int64, device=device)
    tokens = torch.full((3, 8), -1, dtype=torch.int32, device=device)
    requests = Requests(whole([5, 7, 3]), long([[50], [51], [52]]), tokens, whole([6, 8, 4]))
    inputs = Inputs(whole([1, 1, 1, 1]), long([2, 2, 2, 2]), whole([3, 3, 0, 0]))
    advance(long([60, 61]), whole([2, 0]), requests, inputs)
    assert requests.computed.tolist() == [6, 7, 4]
    assert requests.last_token.flatten().tolist() == [61, 51, 60]
    assert tokens.tolist() == [[-1] * 6 + [61, -1], [-1] * 8, [-1] * 4 + [60, -1, -1, -1]]
    assert requests.lengths.tolist() == [7, 8, 5]
    assert [part.tolist() for part in inputs] == [[60, 61, 1, 1], [4, 6, 2, 2], [5, 7, 0, 0]]


def check_on_the_cpu() -> None:
    """Without fp8: the interpreter rounds 1.99 to 1.0, and has no inline assembly."""
    # The interpreter multiplies no bfloat16.
    check = partial(assert_attention_is_softmax, "cpu", 8, dtype=torch.float16)
    check(4, 2, 64)  # too narrow for `decode_prefix`
    check(4, 2, 256)
    decode_attention.MOST_PREFIX_PROGRAMS = 1  # prefixes have fewer parts than sequences
    check(4, 4, 128)
    assert_greedy_takes_the_likeliest("cpu")
    assert_sampled_tokens_are_the_next_inputs("cpu")
    logit_kernels.DRAWS = 2  # several parts, of one and of two draws
    for allowed in (40, 9001):
        assert_samples_are_sound("cpu", 3, 9001, torch.float32, allowed)
    logit_kernels.LANES, logit_kernels.DRAWS = 32, 1  # parts of 128 tokens, of which each costs seven seconds
    likely = [0, 1, 31, 63, 64, 65, 127, 128, 129]
    chi_squared = chi_squared_of_draws("cpu", 130, likely, draws=400, rows=400)
    assert chi_squared < 26, "8 degrees of freedom: above 26.1 in one of a thousand cases"
    assert_prepared_as_by_separate_layers("cpu", 4, 1, 64)


if __name__ == "__main__":
    check_on_the_cpu()
