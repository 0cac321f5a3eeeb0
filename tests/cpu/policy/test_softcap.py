"""Soft-capped attention by FlexAttention's plain implementation: masks, cap and gradients, compiled as blocks are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from colocated_grpo.policy import attention
from colocated_grpo.policy.attention import Capped, attend_capped, block_mask
from colocated_grpo.policy.attention_kernels import Runs, attend_padded

HEADS, KV_HEADS, SIZE, SCALE, CAP = 4, 2, 16, 0.3, 1.5
RUNS = {
    "short": ([5, 1, 9], [0, 0, 0]),
    "long": ([200, 41, 130], [0, 0, 0]),
    "short prefixes": ([5, 1, 9], [0, 2, 2]),
    "prefixes": ([5, 300, 130], [0, 200, 3]),
    "many prefixes": ([50] * 14, [40] * 14),
}
"""Queries of each run, and keys before its first query."""


@pytest.fixture
def plain_implementation(monkeypatch):
    """FlexAttention on the CPU, compiled without kernels; torch refuses its gradients there."""
    torch.compiler.reset()  # a process may compile a function eight times
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    compiled = torch.compile(flex_attention.flex_attention, dynamic=True, backend="aot_eager")
    monkeypatch.setattr(attention, "_flex_attention", compiled)


def runs_and_tensors(kind: str) -> tuple[Runs, list[Tensor]]:
    queries, before = RUNS[kind]
    keys = [own + earlier for own, earlier in zip(queries, before, strict=True)]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32) for lengths in (queries, keys))
    generator = torch.Generator().manual_seed(0)
    shapes = (sum(queries), HEADS, SIZE), (sum(keys), KV_HEADS, SIZE), (sum(keys), KV_HEADS, SIZE)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    return Runs(cu_q, cu_k, max(queries), max(keys)), tensors


def capped_for(runs: Runs, tensors: list[Tensor], window: int | None) -> Capped:
    mask = block_mask(runs, window, len(tensors[0]), len(tensors[1]))
    return Capped(torch.tensor(CAP), {window: mask})


@pytest.mark.parametrize(("window", "compiled"), [(None, False), (1, False), (150, True)])
@pytest.mark.parametrize("kind", ["short", "long", "prefixes"])
def test_output_and_gradients_equal_padded_attention(plain_implementation, kind, window, compiled):
    runs, tensors = runs_and_tensors(kind)
    in_a_block = torch.compile(attend_capped, fullgraph=True, dynamic=True, backend="aot_eager")
    attend = in_a_block if compiled else attend_capped
    results = []
    for out in (
        attend(*tensors, capped_for(runs, tensors, window), SCALE, window),
        attend_padded(*tensors, runs, SCALE, window, softcap=CAP),
    ):
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for name, actual, expected in zip(("output", "query", "key", "value"), *results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")
    uncapped = attend_padded(*tensors, runs, SCALE, window)
    assert window == 1 or (uncapped - results[0][0]).abs().max() > 1e-3, "the cap must matter"


def blocks_of(counts: Tensor, positions: Tensor) -> Tensor:
    """Return which blocks of keys are listed for each block of queries."""
    listed = torch.arange(positions.shape[-1]) < counts[0, 0, :, None]
    return torch.zeros_like(listed).scatter(1, positions[0, 0].long(), listed)


@pytest.mark.parametrize("window", [None, 1, 150])
@pytest.mark.parametrize("kind", RUNS)
def test_the_blocks_are_those_of_torch_which_computes_each_pair(kind, window):
    runs, tensors = runs_and_tensors(kind)
    mask = capped_for(runs, tensors, window).masks[window]
    exact = flex_attention.create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")
    whole, exact_whole = (blocks_of(own.full_kv_num_blocks, own.full_kv_indices) for own in (mask, exact))
    masked, exact_masked = (blocks_of(own.kv_num_blocks, own.kv_indices) for own in (mask, exact))
    rows, columns = exact_whole.shape
    assert not whole[rows:].any() and not masked[rows:].any(), "blocks after the last query"
    assert not whole[:, columns:].any() and not masked[:, columns:].any(), "blocks after the last key"
    whole, masked = whole[:rows, :columns], masked[:rows, :columns]
    assert torch.equal(whole, exact_whole), "blocks of which each query sees each key"
    assert not (masked < exact_masked).any(), "a block with a visible key is missing"
    # Keys between those that the last query of a run and the first of the next one see are in blocks of their own.
    assert (masked > exact_masked).sum() <= (1 if "prefixes" in kind and window else 0)


def test_one_compiled_kernel_serves_all_lengths_and_windows(plain_implementation):
    compiled = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    attend = torch.compile(attend_capped, fullgraph=True, dynamic=True, backend=backend)
    for kind in ("prefixes", "short prefixes", "many prefixes"):  # the first has as many blocks of queries as heads
        runs, tensors = runs_and_tensors(kind)
        for window in (1, 150):
            masks = capped_for(runs, tensors, window).masks
            with torch.no_grad():
                attend(*tensors, Capped(torch.tensor(CAP), {None: masks[window]}), SCALE, None)
    assert len(compiled) == 1
