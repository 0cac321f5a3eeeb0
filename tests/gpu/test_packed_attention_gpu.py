"""CUDA attention kernels against the padded implementation, which the CPU tests verify."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from colocated_grpo.batching.micro_batch import build_micro_batch
from colocated_grpo.policy.attention import Capped, attend_capped, block_mask, expand_keys
from colocated_grpo.policy.attention_kernels import (
    Runs,
    attend_fa4,
    attend_padded,
    attend_varlen,
    has_fa4,
)
from tests.support.paths import ROOT
from tests.support.small_policy import sequence_of

pytestmark = pytest.mark.gpu

LENGTHS = [37, 1, 300, 128, 5]
SIBLINGS = {40: [37, 1, 300], 150: [128, 5, 70, 2]}
"""Tokens of each sibling after the common prefix, by the length of that prefix."""
HEADS = 8
CAP = 1.5
MAX_BF16_DIFFERENCE = 2**-7
"""Two relative rounding errors of bfloat16: the kernel rounds a key's gradient per query head, then their sum."""


def heads(count: int, tokens: int, seed: int, size: int = 64) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(tokens, count, size, device="cuda", dtype=torch.bfloat16, generator=generator)


def attention_of(attend, keys_of, runs: Runs, tensors, dtype: torch.dtype, scaling, window) -> list[torch.Tensor]:
    """Return the output and the gradients of query, key and value."""
    query, key, value = (tensor.to(dtype).detach().requires_grad_() for tensor in tensors)
    out = attend(query, keys_of(key), keys_of(value), runs, scaling, window)
    upstream = heads(HEADS, len(query), seed=9, size=value.shape[-1]).float()
    return [out.detach(), *torch.autograd.grad((out.float() * upstream).sum(), (query, key, value))]


def assert_as_exact_as_padded(kernel, keys_of, runs: Runs, tensors, scaling, window) -> None:
    run = partial(attention_of, keys_of=keys_of, runs=runs, tensors=tensors, scaling=scaling, window=window)
    exact, padded = (run(attend_padded, dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
    assert_close_to_exact(run(kernel, dtype=torch.bfloat16), padded, exact)


def assert_close_to_exact(tested: list[torch.Tensor], padded: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    """Compare the errors of two results in bfloat16: output and gradients of query, key, value, then sinks if any."""
    # A sink's gradient is a sum over all tokens, whose roundings of the output add up.
    limits = dict.fromkeys(("output", "query", "key", "value"), MAX_BF16_DIFFERENCE) | {"sinks": 2**-6}
    assert len(tested) == len(padded) == len(exact)
    for (name, limit), a, b, c in zip(limits.items(), tested, padded, exact, strict=False):
        error, usual = ((tensor.double() - c).norm() / c.norm() for tensor in (a, b))
        assert error < max(2 * usual, limit), f"{name}: relative error {error:.2e}, padded bf16 has {usual:.2e}"


def own_keys(count_kv: int, size: int) -> tuple[Runs, list[torch.Tensor]]:
    """Return runs without prefixes, and their query, key and value."""
    cu = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32, device="cuda")
    tensors = [heads(count, sum(LENGTHS), seed, size) for seed, count in enumerate((HEADS, count_kv, count_kv))]
    return Runs(cu, cu, max(LENGTHS), max(LENGTHS)), tensors


def with_prefixes(count_kv: int, size: int) -> tuple[partial, Runs, list[torch.Tensor]]:
    """Return the function that copies prefix keys, the runs of siblings, and their query, key and value."""
    sequences = [
        replace(sequence_of(prefix + own), scored=np.array([prefix]), group=prefix, prefix_length=prefix)
        for prefix, siblings in SIBLINGS.items()
        for own in siblings
    ]
    tokens = build_micro_batch(sequences).tokens
    keys = tokens.prefix_keys
    keys = keys._replace(**{n: t.cuda() for n, t in keys._asdict().items() if isinstance(t, torch.Tensor)})
    runs = Runs(tokens.cu_seqlens.cuda(), keys.cu_seqlens, tokens.max_seqlen, keys.max_seqlen)
    counts = HEADS, count_kv, count_kv
    tensors = [heads(count, tokens.num_tokens, seed, size) for seed, count in enumerate(counts)]
    return partial(expand_keys, prefix_keys=keys), runs, tensors


def unchanged(keys: torch.Tensor) -> torch.Tensor:
    return keys


def runs_of(kind: str, kv_heads: int, size: int):
    """Return the function that copies prefix keys, the runs, and their query, key and value."""
    return (unchanged, *own_keys(kv_heads, size)) if kind == "own keys" else with_prefixes(kv_heads, size)


def assert_sinks_as_exact_as_padded(kernel, keys_of, runs: Runs, tensors, window) -> None:
    """Compare output and gradients of query, key, value and sinks with padded attention in float64 and bfloat16."""
    sinks = torch.arange(HEADS, device="cuda") * 0.75 - 2  # from hardly any weight to most of it; exact in bfloat16

    def results(attend, dtype: torch.dtype) -> list[torch.Tensor]:
        *inputs, sinks_H = (tensor.to(dtype).detach().requires_grad_() for tensor in (*tensors, sinks))
        query, key, value = inputs
        out = attend(query, keys_of(key), keys_of(value), runs, None, window, sinks_H=sinks_H)
        upstream = heads(HEADS, len(query), seed=9, size=query.shape[-1]).double()
        return [out.detach(), *torch.autograd.grad((out.double() * upstream).sum(), (*inputs, sinks_H))]

    exact = results(attend_padded, torch.float64)
    assert_close_to_exact(results(kernel, torch.bfloat16), results(attend_padded, torch.bfloat16), exact)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("window", [None, 2, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("kind", ["own keys", "prefixes"])
def test_attention_with_sinks_equals_padded_attention_in_value_and_gradients(kind, kv_heads, window, size):
    keys_of, runs, tensors = runs_of(kind, kv_heads, size)
    assert_sinks_as_exact_as_padded(attend_varlen, keys_of, runs, tensors, window)


@pytest.mark.parametrize("window", [None, 16])
def test_compiled_attention_with_sinks_has_the_same_gradients_and_no_graph_break(window):
    def attend(query, key, value, runs, scaling, window, *, sinks_H):
        # Heads first in memory, as projections produce them: tokens are not contiguous.
        query, key, value = (tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (query, key, value))
        return attend_varlen(query * 1, key, value, runs, scaling, window, sinks_H=sinks_H * 1) * 1

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    runs, tensors = own_keys(2, 64)
    assert_sinks_as_exact_as_padded(compiled, unchanged, runs, tensors, window)


def softmax_of_capped(query, key, value, runs: Runs, scaling, window):
    return attend_padded(query, key, value, runs, scaling, window, softcap=CAP)


def flex_attention(query, key, value, runs: Runs, scaling, window):
    masks = {window: block_mask(runs, window, len(query), len(key))}
    return attend_capped(query, key, value, Capped(torch.full((), CAP, device="cuda"), masks), scaling, window)


def assert_capped_as_exact_as_padded(kernel, keys_of, runs: Runs, tensors, scaling, window) -> None:
    run = partial(attention_of, keys_of=keys_of, runs=runs, tensors=tensors, scaling=scaling, window=window)
    exact, padded = (run(softmax_of_capped, dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
    assert_close_to_exact(run(kernel, dtype=torch.bfloat16), padded, exact)
    uncapped = run(attend_padded, dtype=torch.float64)
    assert (uncapped[0] - exact[0]).norm() > 0.01 * exact[0].norm(), "the cap must matter"


@pytest.mark.parametrize(("kv_heads", "size"), [(1, 64), (4, 256), (8, 128)])
def test_attention_with_capped_scores_equals_padded_attention_in_value_and_gradients(kv_heads, size):
    torch.compiler.reset()  # a process may compile a function eight times
    for kind in ("own keys", "prefixes"):
        keys_of, runs, tensors = runs_of(kind, kv_heads, size)
        for window in (None, 2, 100):
            assert_capped_as_exact_as_padded(flex_attention, keys_of, runs, tensors, None, window)


@pytest.mark.parametrize("window", [None, 16])
def test_attention_with_capped_scores_inside_compiled_code_has_the_same_gradients_and_no_graph_break(window):
    def attend(query, key, value, capped, window):
        # Heads first in memory, as projections produce them: tokens are not contiguous.
        query, key, value = (tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (query, key, value))
        return attend_capped(query * 1, key, value, capped, 0.2, window) * 1

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)

    def in_a_block(query, key, value, runs, scaling, window):
        masks = {window: block_mask(runs, window, len(query), len(key))}
        return compiled(query, key, value, Capped(torch.full((), CAP, device="cuda"), masks), window)

    for kind in ("own keys", "prefixes"):  # with other numbers of tokens and keys
        keys_of, runs, tensors = runs_of(kind, 4, 256)
        assert_capped_as_exact_as_padded(in_a_block, keys_of, runs, tensors, 0.2, window)


def fa4_or_skip(kv_heads: int, size: int):
    if not has_fa4(HEADS, kv_heads, size, torch.bfloat16, torch.device("cuda", 0)):
        pytest.skip("this device, or this vLLM, has no FlashAttention 4")
    return partial(attend_fa4, min_run=0)  # on short runs as well


def test_heads_that_are_too_large_for_the_varlen_kernel_attend_over_padded_runs():
    runs, tensors = own_keys(2, 512)
    assert_as_exact_as_padded(attend_varlen, unchanged, runs, tensors, 1.0, None)


@pytest.mark.parametrize("kind", ["own keys", "prefixes"])
@pytest.mark.parametrize(("size", "value_size"), [(192, 128), (96, 32)])
def test_the_varlen_kernel_attends_to_values_with_smaller_heads(size, value_size, kind):
    keys_of, runs, (query, key, value) = runs_of(kind, HEADS, size)
    tensors = query, key, value[..., :value_size]
    assert_as_exact_as_padded(attend_varlen, keys_of, runs, tensors, 0.2, None)


@pytest.mark.parametrize("window", [None, 2, 16])
@pytest.mark.parametrize("scaling", [None, 0.2])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_the_varlen_kernel_equals_padded_attention_in_value_and_gradients(kv_heads, scaling, window):
    runs, tensors = own_keys(kv_heads, 64)
    assert_as_exact_as_padded(attend_varlen, unchanged, runs, tensors, scaling, window)


@pytest.mark.parametrize("window", [None, 2, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_the_varlen_kernel_equals_padded_attention_with_common_prefixes(kv_heads, window):
    keys_of, runs, tensors = with_prefixes(kv_heads, 64)
    assert_as_exact_as_padded(attend_varlen, keys_of, runs, tensors, None, window)


@pytest.mark.parametrize("scaling", [None, 0.2])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_flash_attention_4_equals_padded_attention_in_value_and_gradients(kv_heads, size, scaling):
    runs, tensors = own_keys(kv_heads, size)
    assert_as_exact_as_padded(fa4_or_skip(kv_heads, size), unchanged, runs, tensors, scaling, None)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_flash_attention_4_equals_padded_attention_with_common_prefixes(kv_heads, size):
    keys_of, runs, tensors = with_prefixes(kv_heads, size)
    assert_as_exact_as_padded(fa4_or_skip(kv_heads, size), keys_of, runs, tensors, None, None)


def test_compiled_flash_attention_4_has_the_same_gradients_and_no_graph_break():
    runs, tensors = own_keys(2, 128)
    kernel = fa4_or_skip(2, 128)

    def attend(query, key, value, runs, scaling, window):
        # Heads first in memory, as projections produce them: tokens are not contiguous.
        query, key, value = (tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (query, key, value))
        return kernel(query * 2, key, value, runs, scaling, window) * 3

    plain, compiled = (
        attention_of(form, unchanged, runs, tensors, torch.bfloat16, None, None)
        for form in (attend, torch.compile(attend, fullgraph=True, dynamic=True))
    )
    for name, a, b in zip(("output", "query", "key", "value"), plain, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6, msg=lambda text, name=name: f"{name}: {text}")


def test_flash_attention_4_repeats_its_gradients_with_deterministic_algorithms():
    runs, tensors = own_keys(2, 128)
    kernel = fa4_or_skip(2, 128)
    torch.use_deterministic_algorithms(True)
    try:
        results = [attention_of(kernel, unchanged, runs, tensors, torch.bfloat16, None, None) for _ in range(8)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for later in results[1:] for a, b in zip(results[0], later, strict=True))


WITHOUT_COMPILER = """
import sys, torch
import cutlass.cute
from colocated_grpo.policy.attention_kernels import has_fa4

if sys.argv[1] == "read":
    cutlass.cute.compile = None
assert has_fa4(4, 2, 128, torch.bfloat16, torch.device("cuda", 0))
"""


def test_a_later_process_reads_the_compiled_kernels_of_flash_attention_4(tmp_path):
    fa4_or_skip(2, 128)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_ATTENTION_CUTE")}
    for action in ("compile", "read"):
        command = [sys.executable, "-c", WITHOUT_COMPILER, action]
        subprocess.run(command, env=variables | {"VLLM_CACHE_ROOT": str(tmp_path)}, cwd=ROOT, check=True)
    kept = {path.suffix for path in (tmp_path / "flash_attention_4").rglob("*") if path.is_file()}
    assert kept == {".o", ".lock"}
