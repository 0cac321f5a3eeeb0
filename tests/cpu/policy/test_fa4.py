"""FlashAttention 4 where it is supported, torch's kernels elsewhere. Its arithmetic is tested in tests/gpu."""

from __future__ import annotations

import logging
from functools import partial
from itertools import pairwise, product
from math import nan
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig, PretrainedConfig

from colocated_grpo.batching.micro_batch import build_micro_batch
from colocated_grpo.policy import attention_kernels, flash_attention, model_loader
from colocated_grpo.policy.attention import PACKED, PACKED_FA4, implementation_for
from colocated_grpo.policy.attention_kernels import Runs, attend_fa4, attend_padded, has_fa4
from tests.support.small_policy import config_of, policy_of, sequence_of

GPU = torch.device("cuda", 0)
QWEN = AutoConfig.for_model("qwen3", num_attention_heads=16, num_key_value_heads=8, head_dim=128)
LONGEST = 5, 8
"""Queries and keys of the longest run in `problem`, whose runs have 4 queries on average."""
KINDS = [pytest.param(4, id="long"), pytest.param(5, id="short")]
"""Minimum lengths with which these runs are long and short."""


@pytest.fixture
def hopper(monkeypatch):
    """Pretend to have a Hopper device. Yields a setter for the outcome of the comparison of kernels."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def set_difference(difference: float | Exception):
        def compare(*_):
            if isinstance(difference, Exception):
                raise difference
            return difference

        monkeypatch.setattr(attention_kernels, "_fa4_difference", compare)
        has_fa4.cache_clear()

    set_difference(1e-3)
    yield set_difference
    has_fa4.cache_clear()


def test_flash_attention_4_is_chosen_on_hopper_only(hopper, monkeypatch):
    assert implementation_for(QWEN, torch.bfloat16, GPU, longest=1024) == PACKED_FA4
    assert implementation_for(QWEN, torch.bfloat16, torch.device("cpu"), longest=1024) == PACKED
    has_fa4.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert implementation_for(QWEN, torch.bfloat16, GPU, longest=1024) == PACKED


def test_it_is_not_compiled_if_all_sequences_are_too_short_for_it(hopper):
    implementation_for(QWEN, torch.bfloat16, GPU, longest=191)
    assert has_fa4.cache_info().currsize == 0
    implementation_for(QWEN, torch.bfloat16, GPU, longest=192)
    assert has_fa4.cache_info().currsize == 1


@pytest.mark.parametrize(("ranks", "heads"), [(1, (16, 8)), (4, (4, 2)), (16, (1, 1))])
def test_it_is_compared_with_the_heads_that_a_rank_has(monkeypatch, ranks, heads):
    seen = []
    monkeypatch.setattr(attention_kernels, "has_fa4", lambda *arguments: seen.append(arguments[:2]))
    implementation_for(QWEN, torch.bfloat16, GPU, longest=1024, context_parallel=ranks)
    assert seen == [heads]


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"head_dim": 128}, torch.float32),
        ({"head_dim": 96}, torch.bfloat16),
        ({"head_dim": None, "hidden_size": 16 * 80}, torch.bfloat16),
    ],
)
def test_it_is_chosen_for_16_bit_types_and_tested_head_sizes_only(hopper, settings, dtype):
    config = AutoConfig.for_model("llama", num_attention_heads=16, **settings)
    assert implementation_for(config, dtype, GPU, longest=1024) == PACKED


def test_a_model_with_unknown_names_for_its_heads_gets_torchs_kernels(hopper):
    assert implementation_for(PretrainedConfig(attention_width=2048), torch.bfloat16, GPU, longest=1024) == PACKED


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (ModuleNotFoundError("No module named 'cutlass'"), "ModuleNotFoundError: No module named 'cutlass'"),
        (TypeError("got an unexpected keyword\nargument 'lse'"), "TypeError: got an unexpected keyword argument 'lse'"),
        (0.5, "it differs from FlashAttention 2 by 5.0e-01"),
        (nan, "it differs from FlashAttention 2 by nan"),
    ],
)
def test_a_failed_compilation_or_comparison_falls_back_and_is_logged_once(hopper, caplog, outcome, reason):
    hopper(outcome)
    with caplog.at_level(logging.WARNING):
        assert implementation_for(QWEN, torch.bfloat16, GPU, longest=1024) == PACKED
        assert implementation_for(QWEN, torch.bfloat16, GPU, longest=1024) == PACKED
    assert caplog.messages == [f"training with FlashAttention 2 instead of the faster 4: {reason}"]


def test_a_compiled_kernel_that_cannot_be_kept_is_used_all_the_same(tmp_path):
    def export(*, object_file_path: str, function_name: str):
        with open(object_file_path, "wb") as file:
            file.write(b"half of " + function_name.encode())
        raise OSError(28, "No space left on device")

    cache = SimpleNamespace(cache_path=tmp_path, _key_to_hash="{0[0]}".format, EXPORT_FUNCTION_PREFIX="func")
    flash_attention._export_whole(cache, ("key",), SimpleNamespace(export_to_c=export))
    assert not [*tmp_path.iterdir()]


def test_on_cpu_a_policy_built_for_it_scores_like_any_other(world, model_folder, monkeypatch):
    config, micro_batch = config_of(model_folder()), build_micro_batch([sequence_of(5), sequence_of(9)])
    usual = policy_of(config, world).score(micro_batch)
    monkeypatch.setattr(model_loader, "implementation_for", lambda *_, **__: PACKED_FA4)
    built = policy_of(config, world)
    assert built.model.lm.config._attn_implementation == PACKED_FA4
    assert torch.equal(built.score(micro_batch), usual)


@pytest.fixture
def kernels_used(monkeypatch) -> list[str]:
    """Replace all kernels by functions that return zeros. Returns the names of those that were called."""
    used = []

    def kernel(name):
        def attend(query, *_, **__):
            used.append(name)
            return torch.zeros(query.shape), torch.zeros(query.shape[1], len(query))

        return attend

    monkeypatch.setattr(flash_attention, "fa2_forward", kernel("FlashAttention 2"))
    monkeypatch.setattr(
        flash_attention,
        "fa4",
        lambda: SimpleNamespace(
            _flash_attn_fwd=kernel("FlashAttention 4"), _flash_attn_bwd=kernel("its backward pass")
        ),
    )
    return used


@pytest.mark.parametrize(
    ("length", "window", "sizes", "used"),
    [
        (192, None, (64, 64), "FlashAttention 4"),
        (191, None, (64, 64), "FlashAttention 2"),
        (1000, 64, (64, 64), "FlashAttention 2"),
        (1000, None, (96, 96), "FlashAttention 2"),
        (1000, None, (128, 64), "FlashAttention 2"),
    ],
)
def test_short_runs_windows_and_other_head_sizes_use_flash_attention_2(kernels_used, length, window, sizes, used):
    cu = torch.tensor([0, length, 2 * length])
    query, value = (torch.zeros(2 * length, 1, size) for size in sizes)
    attend_fa4(query, query, value, Runs(cu, cu, length, length), None, window)
    assert kernels_used == [used]


def test_compiled_code_has_one_graph_for_short_and_long_runs(kernels_used):
    torch._dynamo.reset()  # graphs of other tests could serve as well
    counters.clear()
    compiled = torch.compile(attend_fa4, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (100, 300):
        cu, query = torch.tensor([0, length, 2 * length]), torch.zeros(2 * length, 1, 64)
        compiled(query, query, query, Runs(cu, cu, length, length), None, None)
    assert kernels_used == ["FlashAttention 2", "FlashAttention 4"]
    assert counters["stats"]["unique_graphs"] == 1


def attention_by_hand(query, key, value, grad, cu_seqlens_q, cu_seqlens_k, softmax_scale):
    """Return the output and the gradients of query, key and value, computed head by head."""
    out, *gradients = (torch.zeros(tensor.shape) for tensor in (query, query, key, value))
    repeat = query.shape[1] // key.shape[1]
    boundaries = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for ((first_q, last_q), (first_k, last_k)), head in product(boundaries, range(query.shape[1])):
        rows, seen = (slice(first_q, last_q), head), (slice(first_k, last_k), head // repeat)
        hidden = torch.ones(last_q - first_q, last_k - first_k).triu(1 + (last_k - first_k) - (last_q - first_q)).bool()
        scores = (query[rows] @ key[seen].T * softmax_scale).masked_fill(hidden, -torch.inf)
        weights = torch.softmax(scores, dim=1)
        out[rows] = weights @ value[seen]
        of_weights = grad[rows] @ value[seen].T
        of_scores = weights * (of_weights - (of_weights * weights).sum(1, keepdim=True)) * softmax_scale
        gradients[0][rows] = of_scores @ key[seen]
        gradients[1][seen] += of_scores.T @ query[rows]
        gradients[2][seen] += weights.T @ grad[rows]
    return out, *gradients


@pytest.fixture
def plain_kernels(monkeypatch):
    """Replace the kernels by `attention_by_hand`, called with the same arguments."""

    def forward(query, key, value, *, max_seqlen_q, max_seqlen_k, causal, return_lse, **settings):
        assert causal and return_lse and (max_seqlen_q, max_seqlen_k) == LONGEST
        out, *_ = attention_by_hand(query, key, value, torch.zeros(query.shape), **settings)
        return out, torch.zeros(query.shape[1], query.shape[0]), None, None

    def backward(query, key, value, out, grad, logsumexp, *, max_seqlen_q, max_seqlen_k, causal, **settings):
        targets = [settings.pop(name) for name in ("dq", "dk", "dv")]
        assert causal and not settings.pop("deterministic") and (max_seqlen_q, max_seqlen_k) == LONGEST
        again, *gradients = attention_by_hand(query, key, value, grad, **settings)
        torch.testing.assert_close(again, out)
        assert logsumexp.shape == (query.shape[1], query.shape[0])
        for target, gradient in zip(targets, gradients, strict=True):
            target.copy_(gradient)
        return tuple(targets)

    def forward_2(query, key, value, runs, scale, left):
        cu_q, cu_k, longest_q, longest_k = runs
        assert (longest_q, longest_k, left) == (*LONGEST, -1)
        out, *_ = attention_by_hand(query, key, value, torch.zeros(query.shape), cu_q, cu_k, scale)
        return torch.empty_like(query).copy_(out), torch.zeros(query.shape[1], query.shape[0])

    def backward_2(grad, query, key, value, out, logsumexp, runs, scale, left):
        cu_q, cu_k, longest_q, longest_k = runs
        assert (longest_q, longest_k, left) == (*LONGEST, -1)
        inputs = query, key, value
        _, *gradients = attention_by_hand(*inputs, grad, cu_q, cu_k, scale)
        return tuple(torch.empty_like(like).copy_(made) for like, made in zip(inputs, gradients, strict=True))

    module = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setattr(flash_attention, "fa4", lambda: module)
    monkeypatch.setattr(flash_attention, "fa2_forward", forward_2)
    monkeypatch.setattr(flash_attention, "fa2_backward", backward_2)


def problem() -> tuple[list[torch.Tensor], Runs, torch.Tensor]:
    """Two runs, one with prefix keys; heads first in memory, as projections produce them."""
    torch.manual_seed(0)
    shapes = [(4, 8, 16), (2, 11, 16), (2, 11, 16)]
    tensors = [torch.randn(shape).transpose(0, 1).requires_grad_() for shape in shapes]
    cu_q, cu_k = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 3, 11], dtype=torch.int32)
    return tensors, Runs(cu_q, cu_k, *LONGEST), torch.randn(8, 4, 16)


@pytest.mark.parametrize("min_run", KINDS)
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_operator_passes_its_kernels_the_right_arguments_for_values_and_gradients(
    plain_kernels, monkeypatch, scaling, compiled, min_run
):
    monkeypatch.setattr(flash_attention, "FA4_HEAD_SIZES", (16,))
    tensors, runs, grad = problem()
    results = []
    for attend in (attend_padded, partial(attend_fa4, min_run=min_run)):
        form = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager") if compiled else attend
        out = form(*tensors, runs, scaling, None)
        results.append([out, *torch.autograd.grad(out, tensors, grad)])
    for plain, operator in zip(*results, strict=True):
        torch.testing.assert_close(operator, plain)


@pytest.mark.parametrize("min_run", KINDS)
def test_the_fake_implementations_have_the_shapes_and_strides_of_the_real_ones(plain_kernels, min_run):
    tensors, runs, grad = problem()
    settings = runs.cu_q, runs.cu_k, runs.longest_q, runs.longest_k, 0.25, -1, min_run
    forward = torch.library.opcheck(flash_attention.packed_flash, (*tensors, None, *settings))
    tensors = [tensor.detach() for tensor in tensors]
    made = flash_attention.packed_flash(*tensors, None, *settings)
    backward = torch.library.opcheck(flash_attention.flash_backward, (grad, *tensors, *made, *settings))
    assert {*forward.values(), *backward.values()} == {"SUCCESS"}
