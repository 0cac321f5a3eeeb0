"""Attention sinks by kernels without sinks: torch's FlashAttention, computed here by plain operations in float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from colocated_grpo.policy.attention_kernels import Runs, attend_padded, attend_varlen

HEADS, KV_HEADS, SIZE, SCALE = 4, 2, 8, 0.3
SINKS = torch.tensor([-3.0, 0.0, 1.0, 4.0]).double()
CU_Q, CU_K = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 5, 6, 15], [0, 5, 9, 20]))
RUNS = Runs(CU_Q, CU_K, 9, 11)
"""Three runs; the last two see keys before their first query."""


def runs_of(query: Tensor, cu_q: Tensor, cu_k: Tensor, left: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the queries and keys of each run, and which keys a query sees."""
    for (start, end), (first, last) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        distance = torch.arange(end - start)[:, None] + (last - first) - (end - start) - torch.arange(last - first)
        yield slice(start, end), slice(first, last), (distance >= 0) & ((left < 0) | (distance <= left))


def weights(query: Tensor, key: Tensor, seen: Tensor, logsumexp_HL: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the weights [H, L, M] of a run and their logsumexps; those given take precedence, as in FlashAttention."""
    scores = torch.einsum("lhd,mhd->hlm", query, key.repeat_interleave(HEADS // KV_HEADS, 1)) * SCALE
    scores = scores.masked_fill(~seen, -torch.inf)
    logsumexp_HL = scores.logsumexp(-1) if logsumexp_HL is None else logsumexp_HL
    return (scores - logsumexp_HL[:, :, None]).exp(), logsumexp_HL


def forward(query, key, value, cu_q, cu_k, longest_q, longest_k, dropout, causal, debug, *, scale, **window):
    """Take the place of `aten::_flash_attention_forward`."""
    left, right = window["window_size_left"], window["window_size_right"]
    assert (longest_q, longest_k, dropout, causal, debug, scale, right) == (9, 11, 0.0, left == -1, False, SCALE, 0)
    out, logsumexp = torch.empty_like(query), query.new_empty(HEADS, len(query))
    for queries, keys, seen in runs_of(query, cu_q, cu_k, left):
        run, logsumexp[:, queries] = weights(query[queries], key[keys], seen, None)
        out[queries] = torch.einsum("hlm,mhd->lhd", run, value[keys].repeat_interleave(HEADS // KV_HEADS, 1))
    return out, logsumexp, query.new_zeros(2, dtype=torch.uint64), query.new_empty(0), query.new_empty(0)


ORDERED: list[bool] = []
"""True for each call of `backward` while deterministic algorithms were enabled."""


def backward(
    grad, query, key, value, out, logsumexp, cu_q, cu_k, longest_q, longest_k, dropout, causal, *_, scale, **window
):
    """Take the place of `aten::_flash_attention_backward`, whose formulas these are."""
    left, right = window["window_size_left"], window["window_size_right"]
    assert (longest_q, longest_k, dropout, causal, scale, right) == (9, 11, 0.0, left == -1, SCALE, 0)
    # The kernel adds in a fixed order only if other operators would raise an error instead of a warning.
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    ORDERED.append(torch.are_deterministic_algorithms_enabled())
    gradients = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    per_head = lambda tensor: tensor.unflatten(1, (KV_HEADS, -1)).sum(2)  # noqa: E731
    for queries, keys, seen in runs_of(query, cu_q, cu_k, left):
        run, _ = weights(query[queries], key[keys], seen, logsumexp[:, queries])
        whole_key, whole_value = (tensor[keys].repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value))
        delta = (grad[queries] * out[queries]).sum(-1).T[:, :, None]
        of_scores = run * (torch.einsum("lhd,mhd->hlm", grad[queries], whole_value) - delta) * SCALE
        gradients[0][queries] = torch.einsum("hlm,mhd->lhd", of_scores, whole_key)
        gradients[1][keys] = per_head(torch.einsum("hlm,lhd->mhd", of_scores, query[queries]))
        gradients[2][keys] = per_head(torch.einsum("hlm,lhd->mhd", run, grad[queries]))
    return tuple(gradients)


@pytest.fixture
def flash_attention():
    """Give torch's operators an implementation for CPUs; the dispatcher checks the arguments' names and order."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield


@pytest.mark.parametrize("window", [None, 1, 4])
def test_output_and_all_gradients_equal_attention_with_one_more_column(flash_attention, window):
    generator = torch.Generator().manual_seed(0)
    shapes = (15, HEADS, SIZE), (20, KV_HEADS, SIZE), (20, KV_HEADS, SIZE)
    tensors = [torch.randn(shape, generator=generator).double() for shape in shapes]
    inputs = [tensor.requires_grad_() for tensor in (*tensors, SINKS.clone())]
    *qkv, sinks = inputs
    results = []
    for attend in (attend_varlen, attend_padded):
        out = attend(*qkv, RUNS, SCALE, window, sinks_H=sinks)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for name, actual, expected in zip(("output", "query", "key", "value", "sinks"), *results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")
    assert results[0][4].abs().min() > 1e-3, "every sink must matter"


@pytest.mark.parametrize("ordered", [False, True])
def test_the_backward_pass_adds_in_a_fixed_order_if_deterministic_algorithms_are_enabled(flash_attention, ordered):
    query, key = torch.randn(15, HEADS, SIZE, requires_grad=True), torch.randn(20, KV_HEADS, SIZE)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(ordered, warn_only=True)  # as a run does
    try:
        attend_varlen(query, key, key, RUNS, SCALE, None).sum().backward()
        assert torch.is_deterministic_algorithms_warn_only_enabled()  # as before the backward pass
    finally:
        torch.use_deterministic_algorithms(before)
    assert ORDERED[-1] == ordered


def test_compiled_attention_has_the_same_gradients_and_no_graph_break(flash_attention):
    generator = torch.Generator().manual_seed(0)
    shapes = (15, HEADS, SIZE), (20, KV_HEADS, SIZE), (20, KV_HEADS, SIZE)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    inputs.append(SINKS.float().requires_grad_())

    def attend(query, key, value, sinks):
        return attend_varlen(query * 2, key, value, RUNS, SCALE, 4, sinks_H=sinks + 1) * 3

    for name, actual, expected in zip(
        ("output", "query", "key", "value", "sinks"),
        *(
            [out := function(*inputs), *torch.autograd.grad(out.square().sum(), inputs)]
            for function in (torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager"), attend)
        ),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, msg=lambda text, n=name: f"{n}: {text}")
