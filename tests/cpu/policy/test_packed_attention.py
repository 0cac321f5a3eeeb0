"""Attention over packed sequences equals attention over each sequence separately."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from colocated_grpo.batching.micro_batch import MicroBatch, build_micro_batch
from colocated_grpo.policy.attention import packed_attention
from tests.support.small_policy import rows_of, sequence_of

LENGTHS = [5, 1, 9, 2]
HEAD_DIM = 8


def heads(count: int, seed: int, lengths=tuple(LENGTHS)) -> torch.Tensor:
    return torch.randn(1, count, sum(lengths), HEAD_DIM, generator=torch.Generator().manual_seed(seed)).double()


def attend_packed(query, key, value, lengths, **settings):
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    out, weights = packed_attention(
        nn.Module(), query, key, value, None, cu_seq_lens_q=cu, max_length_q=max(lengths), **settings
    )
    assert weights is None
    return out


def attend_separately(
    query, key, value, lengths, *, scaling=HEAD_DIM**-0.5, sliding_window=None, softcap=None, s_aux=None
):
    """Compute each sequence separately, with loops over tokens and heads: slow but simple."""
    out = torch.zeros(1, query.shape[2], query.shape[1], HEAD_DIM, dtype=query.dtype)
    repeat = query.shape[1] // key.shape[1]
    start = 0
    for length in lengths:
        for position in range(start, start + length):
            first = start if sliding_window is None else max(start, position - sliding_window + 1)
            for head in range(query.shape[1]):
                seen = 0, head // repeat, slice(first, position + 1)
                scores = key[seen] @ query[0, head, position] * scaling
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                sink = scores[:0] if s_aux is None else s_aux[head, None]
                weights = torch.softmax(torch.cat([scores, sink]), dim=0)[: len(scores)]
                out[0, position, head] = weights @ value[seen]
        start += length
    return out


EXTRAS = {
    "plain": {},
    "sinks": {"s_aux": torch.tensor([-2.0, 0.0, 1.0, 3.0]).double()},
    "capped scores": {"softcap": 0.5},
}
"""Arguments beside queries, keys and values, by name."""


def parameters_of(extra: str) -> list[torch.Tensor]:
    return [value for value in EXTRAS[extra].values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("window", [None, 1, 3, 64])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_attention_equals_attention_of_each_sequence_separately(kv_heads, window, extra):
    tensors = [heads(4, 0), heads(kv_heads, 1), heads(kv_heads, 2)]
    inputs = [tensor.requires_grad_() for tensor in (*tensors, *parameters_of(extra))]
    results = []
    for attend in (attend_packed, attend_separately):
        out = attend(*tensors, LENGTHS, scaling=0.3, sliding_window=window, **EXTRAS[extra])
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


PROMPTS, COMPLETIONS = [4, 3], [[5, 1, 2], [6, 2]]
"""Lengths of two prompts, and of the completions of each."""


def micro_batch_with_prefixes() -> MicroBatch:
    """A sequence without siblings, then the siblings of each prompt."""
    sequences = [sequence_of(3)]
    for group, (prompt, completions) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True), start=1):
        siblings = [replace(sequence_of(prompt + own), scored=np.array([prompt])) for own in completions]
        sequences += [replace(sibling, group=group, prefix_length=prompt) for sibling in siblings]
    return build_micro_batch(sequences)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("window", [None, 1, 3, 64])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention_to_a_common_prefix_equals_attention_to_a_separate_copy(kv_heads, window, extra):
    micro_batch = micro_batch_with_prefixes()
    rows, tokens = rows_of(micro_batch), micro_batch.tokens
    lengths = [3, 9, 5, 6, 9, 5]
    assert [len(own) for own in rows] == lengths
    assert tokens.num_tokens == sum(lengths) - 2 * 4 - 3, "each prefix is packed once"
    tensors = [heads(count, seed, (tokens.num_tokens,)) for seed, count in enumerate((4, kv_heads, kv_heads))]
    inputs = [tensor.requires_grad_() for tensor in (*tensors, *parameters_of(extra))]
    packed = packed_attention(
        nn.Module(),
        *tensors,
        None,
        cu_seq_lens_q=tokens.cu_seqlens,
        max_length_q=tokens.max_seqlen,
        prefix_keys=tokens.prefix_keys,
        scaling=0.3,
        sliding_window=window,
        **EXTRAS[extra],
    )[0][:, torch.cat(rows)]
    copies = [tensor[:, :, torch.cat(rows)] for tensor in tensors]
    separate = attend_separately(*copies, lengths, scaling=0.3, sliding_window=window, **EXTRAS[extra])
    results = [[out, *torch.autograd.grad(out.square().sum(), inputs)] for out in (packed, separate)]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_the_scale_defaults_to_one_over_the_square_root_of_the_head_size():
    tensors = heads(2, 0), heads(2, 1), heads(2, 2)
    torch.testing.assert_close(attend_packed(*tensors, LENGTHS), attend_separately(*tensors, LENGTHS))


def test_a_change_in_one_sequence_changes_no_bit_of_the_others():
    attend = partial(attend_packed, lengths=LENGTHS)
    query, key, value = heads(2, 0), heads(2, 1), heads(2, 2)
    before = attend(query, key, value)
    key[:, :, 6:15] *= 3.0
    after = attend(query, key, value)
    changed = (before != after).any(dim=(0, 2, 3))
    assert changed[7:15].all()
    assert not changed[:6].any()
    assert not changed[15:].any()
