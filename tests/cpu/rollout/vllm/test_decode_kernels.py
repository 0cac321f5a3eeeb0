"""The kernels that decoding uses on CUDA devices, run by Triton's interpreter on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.interpreter import interpreted

pytest.importorskip("triton")


def test_the_kernels_equal_plain_arithmetic():
    assert not interpreted("-m", "tests.support.decode_kernels")


def test_only_as_many_parts_are_launched_as_the_longest_sequence_and_the_device_can_use():
    from colocated_grpo.rollout.vllm.decode_attention import (
        LEAST_TOKENS,
        MOST_PARTS,
        MOST_PREFIX_PROGRAMS,
        MOST_PROGRAMS,
        parts_for,
        prefix_parts_for,
    )

    assert [parts_for(64, longest) for longest in (16, LEAST_TOKENS, LEAST_TOKENS + 1)] == [1, 1, 2]
    assert [parts_for(programs, 1 << 20) for programs in (64, MOST_PROGRAMS // 2, 1 << 20)] == [MOST_PARTS, 2, 1]
    assert [prefix_parts_for(programs) for programs in (MOST_PREFIX_PROGRAMS // 2, 1 << 20)] == [2, 1]


TYPES = {
    "*i32": ("table", "lengths", "firsts", "counts", "prefix_tokens", "num_sets", "finished", "cu_q", "key_counts"),
    "*fp32": ("sums", "tops", "masses", "prefix_sums", "prefix_tops", "prefix_masses", "logsumexps"),
    "*bf16": ("query", "keys", "values", "out", "key_scale", "value_scale"),
    "fp32": ("scale",),
}
"""Types of the kernels' arguments; others are sizes."""


@pytest.mark.parametrize(("capability", "fp8"), [(80, False), (90, False), (90, True)])
@pytest.mark.parametrize("name", ["decode_prefix", "decode_own"])
def test_attention_compiles_for_gpus_that_this_machine_lacks(name, capability, fp8):
    from colocated_grpo.rollout.vllm import decode_kernels

    kernel, waits = getattr(decode_kernels, name), capability >= 90
    constants = {"BLOCK": 16, "GROUP": 2, "ROWS": 16, "SIZE": 128, "TILE": 64, "LEAST": 512, "QUANTIZED": fp8}
    types = dict.fromkeys(("keys", "values"), "*u16") if fp8 else {}
    assert (
        "griddepcontrol" in compiled(kernel, constants | {"OVERLAPS": waits, "HAS_PREFIX": True}, types, capability)
    ) == waits


@pytest.mark.parametrize(("single", "page", "window"), [(True, 16, True), (False, 16, True), (False, 0, False)])
def test_exact_attention_compiles_for_hopper(single, page, window):
    from colocated_grpo.runtime import row_attention

    constants = {"GROUP": 2, "ROWS": 16 if single else 64, "SIZE": 128, "TILE": 64, "PART": row_attention.PART}
    constants |= {"PAGE": page, "HAS_WINDOW": window, "SINGLE": single, "LOGSUMEXP": not page}
    ptx = compiled(row_attention._attend, constants, {}, 90, enable_fp_fusion=False)
    assert "fma.rn.f32" not in ptx


def compiled(kernel: Any, constants: dict[str, Any], types: dict[str, str], capability: int, **options: Any) -> str:
    """Return the kernel's PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {argument: kind for kind, arguments in TYPES.items() for argument in arguments} | types
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={argument: types.get(argument, "i32") for argument in kernel.arg_names},
        constexprs={(kernel.arg_names.index(key),): constants[key] for key in constants if key in kernel.arg_names},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": 4} | options).asm["ptx"]


def test_siblings_are_looked_for_once_in_each_forward_pass(monkeypatch):
    from colocated_grpo.rollout.vllm import siblings

    found = []
    monkeypatch.setattr(
        siblings, "find_siblings", lambda table, *_: found.append(table) or siblings.Siblings(*[table] * 4)
    )
    of_step, lengths = siblings.SiblingsOfStep(), torch.ones(2)
    layers = [torch.zeros(1, 16, 1, 64) for _ in range(3)]
    tables = [torch.zeros(2, 1) for _ in range(2)]
    for table in (tables[0], tables[0], tables[1]):  # a captured graph has the table of the pass before it
        for cache in layers:
            of_step.of(cache, table, lengths, 8)
    of_step.of(layers[2], tables[1], lengths, 4)  # another number of query heads
    assert list(map(id, found)) == [id(tables[place]) for place in (0, 0, 1, 1)]


def calls(**changes: object) -> dict[str, object]:
    """Arguments of vLLM's backend for one token of each of many sequences."""
    from colocated_grpo.rollout.vllm.decode_attention import FEWEST_SEQUENCES

    plain: dict[str, object] = {
        "q": torch.zeros(FEWEST_SEQUENCES, 8, 64, dtype=torch.bfloat16),
        "k": torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16),
        "block_table": torch.zeros(FEWEST_SEQUENCES, 1),
        "max_seqlen_q": 1,
        "window_size": [-1, -1],
        "softcap": 0,
        "s_aux": None,
    }
    return plain | changes


def test_vllms_attention_over_an_fp8_cache_gets_queries_in_fp8_within_its_range():
    from colocated_grpo.rollout.vllm.decode_attention import FP8, make_attention

    received = {}
    attend = make_attention(lambda **arguments: received.update(arguments), count_use=lambda: None)
    queries = torch.tensor([1.0, 1e6, -1e6], dtype=torch.bfloat16).view(3, 1, 1)
    attend(**calls(q=queries, k=torch.zeros(4, 16, 2, 64, dtype=FP8)))
    assert received["q"].dtype == FP8
    assert received["q"].float().flatten().tolist() == [1.0, 448.0, -448.0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"k": torch.zeros(4, 16, 2, 64, dtype=torch.float8_e4m3fn)}, True),
        ({"k": torch.zeros(4, 16, 2, 64, dtype=torch.float32)}, False),
        ({"s_aux": torch.zeros(8)}, False),
        ({"softcap": 50.0}, False),
        ({"window_size": [127, 0]}, False),
    ],
)
def test_attention_with_sinks_capped_scores_windows_or_another_cache_is_left_to_vllm(changes, expected):
    from colocated_grpo.rollout.vllm.decode_attention import suits

    assert suits(calls(**changes)) == expected
