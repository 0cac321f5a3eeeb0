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


def test_token_log_probabilities_equal_log_softmax_also_where_tokens_are_forbidden():
    from colocated_grpo.rollout.token_logprobs import compute_token_logprobs

    generator = torch.Generator("cuda").manual_seed(0)
    logits = 4 * torch.randn(33, 20011, device="cuda", generator=generator)
    logits[:, 100:9000] = float("-inf")
    tokens = torch.randint(0, 100, (33, 2), device="cuda", generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        expected = torch.log_softmax(logits.to(dtype).double(), -1).gather(1, tokens)
        torch.testing.assert_close(
            compute_token_logprobs(logits.to(dtype), tokens).double(), expected, rtol=0, atol=1e-4
        )
