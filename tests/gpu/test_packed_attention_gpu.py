"""The varlen kernel that CUDA devices run, against the padded path that the CPU tests have proved exact."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from colocated_grpo.batching import build_micro_batch
from colocated_grpo.policy.attention import Runs, _attend_padded, _attend_varlen, copied

from small_policy import sequence_of

pytestmark = pytest.mark.gpu

LENGTHS = [37, 1, 300, 128, 5]
SIBLINGS = {40: [37, 1, 300], 150: [128, 5, 70, 2]}
"""Own tokens of each sibling, by the length of what they share."""
HEADS, HEAD_DIM = 8, 64
ROUNDINGS = 2**-7
"""Two of bfloat16's, relative: the kernel rounds a key's gradient for each query head and again for their sum."""


def heads(count: int, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(tokens, count, HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=generator)


def attention_of(attend, keys_of, runs: Runs, tensors, dtype: torch.dtype, scaling, window) -> list[torch.Tensor]:
    """Output, and gradients of query, key and value."""
    query, key, value = (tensor.to(dtype).detach().requires_grad_() for tensor in tensors)
    out = attend(query, keys_of(key), keys_of(value), runs, scaling, window)
    upstream = heads(HEADS, len(query), seed=9).float()
    return [out.detach(), *torch.autograd.grad((out.float() * upstream).sum(), (query, key, value))]


def assert_as_exact_as_padded(keys_of, runs: Runs, tensors, scaling, window) -> None:
    run = partial(attention_of, keys_of=keys_of, runs=runs, tensors=tensors, scaling=scaling, window=window)
    exact = run(_attend_padded, dtype=torch.float64)
    padded, varlen = run(_attend_padded, dtype=torch.bfloat16), run(_attend_varlen, dtype=torch.bfloat16)
    for name, a, b, c in zip(("output", "query", "key", "value"), varlen, padded, exact, strict=True):
        error, usual = ((tensor.double() - c).norm() / c.norm() for tensor in (a, b))
        assert error < max(2 * usual, ROUNDINGS), f"{name}: relative error {error:.2e}, padded bf16 has {usual:.2e}"


@pytest.mark.parametrize("window", [None, 2, 16])
@pytest.mark.parametrize("scaling", [None, 0.2])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_the_varlen_kernel_equals_padded_attention_in_value_and_gradients(kv_heads, scaling, window):
    cu = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32, device="cuda")
    tensors = [heads(count, sum(LENGTHS), seed) for seed, count in enumerate((HEADS, kv_heads, kv_heads))]
    runs = Runs(cu, max(LENGTHS), cu, max(LENGTHS))
    assert_as_exact_as_padded(lambda keys: keys, runs, tensors, scaling, window)


@pytest.mark.parametrize("window", [None, 2, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_so_it_does_where_siblings_share_their_beginning(kv_heads, window):
    sequences = [
        replace(sequence_of(shared + own), scored=np.array([shared]), group=shared, shared=shared)
        for shared, siblings in SIBLINGS.items()
        for own in siblings
    ]
    micro_batch = build_micro_batch(sequences)
    shared = micro_batch.shared_keys
    shared = shared._replace(**{n: t.cuda() for n, t in shared._asdict().items() if isinstance(t, torch.Tensor)})
    runs = Runs(micro_batch.cu_seqlens.cuda(), micro_batch.max_seqlen, shared.cu_seqlens, shared.max_seqlen)
    tensors = [heads(count, micro_batch.num_tokens, seed) for seed, count in enumerate((HEADS, kv_heads, kv_heads))]
    assert_as_exact_as_padded(partial(copied, shared=shared), runs, tensors, None, window)
