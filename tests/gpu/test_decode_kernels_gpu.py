"""The kernels that decoding uses on CUDA devices, against plain arithmetic."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

LENGTHS = [1, 15, 16, 17, 64, 65, 200, 0] * 5
BLOCK = 16


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (16, 8), (8, 1)])
def test_one_token_attention_over_the_paged_cache_equals_softmax_over_the_sequence(heads, kv_heads, head_size):
    from colocated_grpo.rollout.decode_attention import decode

    generator = torch.Generator("cuda").manual_seed(0)
    blocks = [-(-length // BLOCK) for length in LENGTHS]
    cache = torch.randn(sum(blocks), BLOCK, kv_heads, 2 * head_size, device="cuda", generator=generator).bfloat16()
    keys, values = cache[..., :head_size], cache[..., head_size:]
    order = torch.randperm(sum(blocks), device="cuda", generator=generator).int()
    table = torch.zeros(len(LENGTHS), max(blocks), dtype=torch.int32, device="cuda")
    for row, ids in enumerate(order.split(blocks)):
        table[row, : len(ids)] = ids
    query = torch.randn(len(LENGTHS), heads, head_size, device="cuda", generator=generator).bfloat16()
    out = torch.full_like(query, float("nan"))
    decode(query, keys, values, out, table, torch.tensor(LENGTHS, dtype=torch.int32, device="cuda"), head_size**-0.5)
    for row, length in enumerate(LENGTHS):
        own = table[row].long()
        k, v = (
            part[own].flatten(0, 1)[:length].double().repeat_interleave(heads // kv_heads, 1) for part in (keys, values)
        )
        weights = torch.softmax(torch.einsum("hd,thd->ht", query[row].double(), k) * head_size**-0.5, -1)
        expected = torch.einsum("ht,thd->hd", weights, v)
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=0.03)


def rows_of(count: int, temperature: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Places, temperatures, seeds and positions of as many sequences; places are not in order."""
    places = torch.arange(count - 1, -1, -1, dtype=torch.int32, device="cuda")
    temperatures = torch.full((count,), temperature, device="cuda")
    seeds = torch.arange(1000, 1000 + count, dtype=torch.int64, device="cuda")
    return places, temperatures, seeds, torch.full((count,), 7, dtype=torch.int64, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 20011), (33, 20011), (3, 50), (600, 4097)])
def test_sampling_also_gives_logsumexp_and_never_a_forbidden_token(rows, vocabulary, dtype):
    from colocated_grpo.rollout.sampling_kernels import sample

    generator = torch.Generator("cuda").manual_seed(0)
    logits = 4 * torch.randn(rows, vocabulary, device="cuda", generator=generator).to(dtype)
    allowed = 40
    logits[:, allowed:] = float("-inf")
    tokens, logsumexp = sample(logits, *rows_of(rows))
    assert int(tokens.max()) < allowed
    torch.testing.assert_close(logsumexp.double(), torch.logsumexp(logits.double(), -1), rtol=0, atol=1e-4)


def test_without_temperature_the_likeliest_token_is_taken():
    from colocated_grpo.rollout.sampling_kernels import sample

    logits = torch.randn(5, 20011, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    tokens, _ = sample(logits, *rows_of(5, temperature=0.0))
    assert torch.equal(tokens, logits.argmax(-1))


def test_tokens_are_drawn_as_often_as_softmax_says_in_every_part_of_the_vocabulary():
    from colocated_grpo.rollout.sampling_kernels import sample

    draws, vocabulary = 40_000, 9000
    likely = torch.tensor([0, 1, 1023, 1024, 2047, 2048, 3071, 3072, 4095, 4096, 8191, 8192, 8999], device="cuda")
    logits = torch.full((vocabulary,), -30.0, device="cuda")
    logits[likely] = torch.linspace(-2.0, 1.0, len(likely), device="cuda")
    expected = draws * torch.softmax(logits.double(), -1)[likely]
    for rows in (4000, 50):  # one part and many
        counts = torch.zeros(vocabulary, device="cuda")
        for batch in range(draws // rows):
            places, temperatures, seeds, positions = rows_of(rows)
            tokens, _ = sample(logits.expand(rows, -1), places, temperatures, seeds, positions + batch)
            counts += torch.bincount(tokens, minlength=vocabulary)
        chi_squared = float(((counts[likely] - expected) ** 2 / expected).sum())
        assert int(counts[likely].sum()) == draws
        assert chi_squared < 40, "12 degrees of freedom: above 32.9 in one of a thousand cases"


def test_a_draw_follows_from_seed_and_position_and_not_from_its_company():
    from colocated_grpo.rollout.sampling_kernels import sample

    logits = torch.randn(1, 151_936, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    alone = [sample(logits, *(part[:1] * 0 + value for part, value in zip(rows_of(1), (0, 1, 5, 9), strict=True)))[0]]
    for company in (3, 200, 2000):
        places, temperatures, seeds, positions = rows_of(company)
        seeds[places[1]], positions[1] = 5, 9
        alone.append(sample(logits.expand(company, -1), places, temperatures, seeds, positions)[0][1:2])
        assert len(sample(logits.expand(company, -1), places, temperatures, seeds, positions)[0].unique()) > 1
    assert len(torch.cat(alone).unique()) == 1


def test_the_sampler_gets_log_probabilities_of_what_it_has_just_drawn():
    from colocated_grpo.rollout import sampling_kernels

    sampling_kernels.install()
    logits = torch.randn(4, 5000, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    options = {"logprob_token_ids_state": None, "expanded_idx_mapping": None, "max_per_req_token_ids": 0}
    tokens = sampling_kernels.sampler.gumbel_sample(logits, *rows_of(4), apply_temperature=False, use_fp64=False)
    for scored in (logits, logits.clone()):  # the second has not been sampled from: vLLM's own path
        scores = sampling_kernels.sampler.compute_topk_scores(scored, 0, tokens, None, **options, logits_mode=False)
        expected = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])
        torch.testing.assert_close(scores.logprobs.double(), expected, rtol=0, atol=1e-4)
        assert torch.equal(scores.logprob_token_ids, tokens[:, None])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 8, 128), (4, 1, 64)])
def test_queries_and_keys_are_normalised_and_rotated_as_by_separate_layers(heads, kv_heads, size):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from colocated_grpo.rollout.qk_norm_rope import normalize_and_rotate, suits

    class Attention(torch.nn.Module):
        pass

    generator = torch.Generator("cuda").manual_seed(0)
    attention, tokens = Attention(), 37
    attention.num_heads, attention.num_kv_heads, attention.head_dim = heads, kv_heads, size
    with set_current_vllm_config(VllmConfig()), torch.device("cuda"):
        attention.q_norm, attention.k_norm = (RMSNorm(size, eps=1e-6, dtype=torch.bfloat16) for _ in range(2))
        rope = {"rope_type": "default", "rope_theta": 1e6}
        attention.rotary_emb = get_rope(size, max_position=4096, rope_parameters=rope, dtype=torch.bfloat16)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.data.normal_(1.0, 0.2, generator=generator)
    positions = torch.randint(0, 4096, (tokens,), device="cuda", generator=generator)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device="cuda", generator=generator).bfloat16()
    assert suits(attention, positions, qkv)
    parts = heads * size, kv_heads * size, kv_heads * size
    q, k, v = (part.double().view(tokens, -1, size) for part in qkv.split(parts, dim=-1))
    normalize_and_rotate(attention, qkv, positions)
    actual = [part.double().view(tokens, -1, size) for part in qkv.split(parts, dim=-1)]

    def expected(x, norm):
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
        angles = positions[:, None, None] * 1e6 ** (-torch.arange(0, size, 2, device="cuda").double() / size)
        left, right = x.chunk(2, -1)
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)

    torch.testing.assert_close(actual[0], expected(q, attention.q_norm), rtol=0.02, atol=0.03)
    torch.testing.assert_close(actual[1], expected(k, attention.k_norm), rtol=0.02, atol=0.03)
    assert torch.equal(actual[2], v)
