"""`numerics: exact` replaces operators, not results: in float32 it equals `fast`, with the same gradients.

The kernels for GPUs run by Triton's interpreter. tests/cpu/runs and tests/gpu compare bits with the engine.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from colocated_grpo.errors import ConfigError
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy import exact
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.rows import page_slots, single_queries
from colocated_grpo.settings import rules
from colocated_grpo.settings.exact import EXACT_TYPES, check_exact
from colocated_grpo.types import Rollout
from tests.support.families import SETTINGS
from tests.support.interpreter import interpreted
from tests.support.small_policy import (
    SHAPE,
    config_of,
    group_of,
    make_small_model,
    pack_for,
    policy_of,
    random_groups,
    rollout_of,
)

FAMILIES = sorted(kind.removesuffix("_text") for kind in EXACT_TYPES)
LLAMA = {"model_type": "llama", "head_dim": 64}
OLDER_GPU = {"on_cpu": False, "on_hopper": False, "float32": False}
HOPPER, CPU = OLDER_GPU | {"on_hopper": True}, OLDER_GPU | {"on_cpu": True, "float32": True}


def computed(world: World, folder: Path, numerics: str, **policy: object) -> tuple[torch.Tensor, dict]:
    """Return log-probabilities of one micro-batch, and the gradients of the loss."""
    config = config_of(folder, numerics=numerics, policy=policy)
    trained = policy_of(config, world)
    minibatch = pack_for(world, random_groups(3, 3), config).minibatches[0]
    logprobs_N = trained.score(minibatch.micro_batches[0])
    trained.forward_backward(minibatch, Metrics(world.device))
    return logprobs_N, {name: p.grad for name, p in trained.parameters().items()}


@pytest.fixture
def plain_experts(monkeypatch):
    """Replace the kernels of experts, which are for GPUs, by plain torch."""

    def choose(logits_TE, chosen, *, normalised):
        weights_TK, experts_TK = logits_TE.softmax(-1).topk(chosen)
        return weights_TK / (weights_TK.sum(-1, keepdim=True) if normalised else 1), experts_TK.int()

    def mix(x_TI, weights_TC, experts_TC, gate_up, down):
        assert experts_TC.dtype == torch.int32
        gate, up = torch.einsum("tcoi,ti->tco", gate_up[experts_TC], x_TI).chunk(2, dim=-1)
        return torch.einsum("tcif,tcf,tc->ti", down[experts_TC], torch.nn.functional.silu(gate) * up, weights_TC)

    monkeypatch.setattr(exact, "_kernels", lambda: SimpleNamespace(choose_experts=choose))
    monkeypatch.setattr(exact.rows, "mix_experts", mix)


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_operators_compute_the_same_and_have_the_same_gradients(world, tmp_path, family, lora, plain_experts):
    sizes = {"hidden_size": 64 * SHAPE.heads} if family == "olmoe" else {"head_dim": 64}
    folder = make_small_model(tmp_path / family, family, edits={**SETTINGS.get(family, {}), **sizes})
    expected, expected_gradients = computed(world, folder, "fast", lora=lora)
    logprobs, gradients = computed(world, folder, "exact", lora=lora)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=1e-5, msg=name)


def test_a_log_probability_does_not_depend_on_packing_micro_batches_and_the_order_of_siblings(world, tmp_path):
    folder = make_small_model(tmp_path / "qwen3", "qwen3", edits={"head_dim": 64, "max_position_embeddings": 512})
    config = config_of(folder, numerics="exact", rollout={"max_completion_tokens": 300})
    policy, rng = policy_of(config, world), random.Random(0)
    tokens = lambda count: [rng.randrange(SHAPE.vocab) for _ in range(count)]  # noqa: E731
    # Lengths at which the fast kernels change their order of summation.
    groups = [[rollout_of(prompt, tokens(count)) for count in (9, 30, 150, 290)] for prompt in (tokens(5), tokens(40))]
    alone = [[rollout] for group in groups for rollout in group]

    def scored(groups: list[list[Rollout]], size: int) -> torch.Tensor:
        packed = [group_of(index, rollouts) for index, rollouts in enumerate(groups)]
        (minibatch,) = pack_for(world, packed, config.with_values("batch", max_tokens_per_micro_batch=size)).minibatches
        # Micro-batches have the sequences in different orders.
        return torch.cat([policy.score(each) for each in minibatch.micro_batches]).sort().values

    expected = scored(groups, 4096)
    for others, size in ((groups, 340), ([group[::-1] for group in groups], 4096), (alone, 4096), (alone, 340)):
        assert torch.equal(scored(others, size), expected)


def test_the_first_token_with_another_log_probability_than_the_samplers_is_named(world, tmp_path):
    config = config_of(make_small_model(tmp_path / "llama", "llama", edits={"head_dim": 64}), numerics="exact")
    policy = policy_of(config, world)
    minibatch = pack_for(world, random_groups(2, 2), config).minibatches[0]
    (micro_batch,) = minibatch.micro_batches
    inputs = replace(micro_batch.loss_inputs, sampling_logprobs_N=policy.score(micro_batch).clone())
    minibatch = replace(minibatch, micro_batches=[replace(micro_batch, loss_inputs=inputs)])
    assert policy.first_difference(minibatch) == ""
    place = int(inputs.loss_mask_N.nonzero()[3])
    inputs.sampling_logprobs_N[place:] += 1e-3
    token, sequence = int(micro_batch.tokens.targets_N[place]), int(inputs.sequence_N[place])
    assert policy.first_difference(minibatch).startswith(f"first: token {token} of sequence {sequence}, policy ")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"engine": {"tensor_parallel_size": 2}}, "engine.tensor_parallel_size"),
        ({"engine": {"args": {"quantization": "fp8"}}}, "engine.args.quantization"),
        ({"engine": {"args": {"use_fp64_gumbel": True}}}, "engine.args.use_fp64_gumbel"),
        ({"engine": {"args": {"moe_backend": "triton"}}}, "engine.args.moe_backend"),
        ({"policy": {"compile": True}}, "policy.compile"),
        ({"policy": {"routing_replay": True}}, "policy.routing_replay"),
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p"),
    ],
)
def test_settings_with_which_the_log_probabilities_differ_are_rejected(tmp_path, settings, named):
    config = config_of(tmp_path, numerics="exact", **settings)
    with pytest.raises(ConfigError, match=f"{named}=.*numerics: exact"):
        rules.check(config)


@pytest.mark.parametrize(
    ("model", "place", "reason"),
    [
        (LLAMA, OLDER_GPU, "Hopper"),
        (LLAMA, HOPPER | {"float32": True}, "policy.compute_dtype: bfloat16"),
        (LLAMA, CPU | {"float32": False}, "policy.compute_dtype: float32"),
        (LLAMA | {"model_type": "gpt2"}, HOPPER, "'gpt2'"),
        (LLAMA | {"model_type": "qwen3_moe"}, CPU, "packs the weights of experts"),
        (LLAMA | {"model_type": "olmoe"}, CPU, "packs the weights of experts"),
        (LLAMA | {"head_dim": 96}, CPU, "heads of 96"),
        (LLAMA | {"rope_scaling": {"type": "yarn"}}, HOPPER, "'yarn'"),
    ],
)
def test_a_device_a_type_or_a_model_that_cannot_be_exact_is_rejected(model, place, reason):
    with pytest.raises(ConfigError, match=f"^numerics=exact: .*{reason}"):
        check_exact(model, **place)


def test_released_models_of_the_supported_families_are_accepted():
    gemma = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    assert check_exact({"model_type": "gemma3_text", "head_dim": 256, "rope_parameters": gemma}, **HOPPER) is None
    llama = {"model_type": "llama", "head_dim": 128, "rope_scaling": {"rope_type": "llama3"}}
    assert check_exact(llama, **CPU) is None


KERNELS = """
from itertools import product

import torch
from colocated_grpo.policy import exact
from colocated_grpo.runtime import row_kernels
from colocated_grpo.runtime.norm_kernels import Normalize, normalize
from colocated_grpo.runtime.row_kernels import Tile, gated, logits, matmul

torch.manual_seed(0)
tiles = Tile(16, 64, 32, 4, 2), Tile(64, 128, 32, 4, 2), Tile(64, 256, 32, 4, 2), None
for dtype, error in ((torch.float32, 1e-5), (torch.float16, 2e-2)):  # the interpreter multiplies no bfloat16
    close = lambda actual, expected: torch.testing.assert_close(actual, expected, rtol=error, atol=10 * error)
    make = lambda *shape: torch.randn(shape, dtype=dtype)
    weight, bias = make(136, 80), make(136)
    unaligned = make(70, 81)[:, :80]
    for x, some, tile, row_kernels.LARGE in product((unaligned, unaligned.contiguous()), (None, bias), tiles, (0, 1e9)):
        together = matmul(x, weight, some, tile=tile)
        close(together, torch.nn.functional.linear(x, weight, some))
        # Fewer and other rows, but too many for another choice of tile, and each at its place: here the kernels call
        # numpy, whose order of summation depends on the place on some processors.
        x[:5].neg_()
        assert torch.equal(together[5:65], matmul(x[:65], weight, some, tile=tile)[5:])
    assert logits(x, weight).dtype == torch.float32

    heads, norm = make(9, 6, 36), make(36)
    normalised = normalize(heads, norm, 1e-5, 1.0)
    close(normalised, exact.plain_norm(heads, norm, 1e-5, 1.0))
    assert torch.equal(normalize(heads[:, 2:4], norm, 1e-5, 1.0), normalised[:, 2:4])
    hidden, residual = make(9, 36), make(9, 36)
    total = hidden + residual
    assert torch.equal(normalize(hidden, norm, 1e-5, 0.0, residual=residual), normalize(total, norm, 1e-5, 0.0))
    assert torch.equal(residual, total)

    angles, positions = torch.randn(50, 18), torch.randint(0, 50, (9,))
    table = torch.cat([angles.cos(), angles.sin()], 1).to(dtype)
    cos, sin = table[positions, None].chunk(2, -1)
    def turned(x):
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
    rotation = None, 0.0, 0.0, positions, table
    assert torch.equal(normalize(heads, norm, 1e-5, 1.0, positions, table), normalize(normalised, *rotation))
    cases = (
        (heads, norm, lambda x, w: turned(exact.plain_norm(x, w, 1e-5, 1.0)), (1e-5, 1.0, positions, table)),
        (make(300, 36), norm, lambda x, w: exact.plain_norm(x, w, 1e-5, 0.0), (1e-5, 0.0, None, None)),
        (heads, None, lambda x: turned(x), rotation[1:]),
    )
    for x, weight, plain, settings in cases:
        leaves = [tensor.requires_grad_() for tensor in (x, weight) if tensor is not None]
        expected, out = plain(*leaves), Normalize.apply(x, weight, *settings)
        close(out, expected)
        grad = torch.randn_like(expected)
        for actual, gradient in zip(*(torch.autograd.grad(each, leaves, grad) for each in (out, expected))):
            torch.testing.assert_close(actual, gradient, rtol=error, atol=30 * error)

    gate, up = make(9, 90).chunk(2, -1)
    for gelu in (False, True):
        both = gated(gate, up, gelu=gelu)
        close(both, exact.plain_gated(gate, up, gelu=gelu))
        assert torch.equal(both, gated(gate.contiguous(), up.contiguous(), gelu=gelu))
print("equal")
"""


def test_the_kernels_compute_each_row_by_itself_and_equal_plain_torch():
    assert interpreted("-c", KERNELS).strip() == "equal"


ATTENTION = """
import torch
from colocated_grpo.policy.attention_kernels import Runs, attend_padded
from colocated_grpo.runtime import row_attention, rows
from colocated_grpo.runtime.row_attention import attend_packed, attend_pages

torch.manual_seed(0)
row_attention.PART = 128
for heads, kv_heads, window in ((4, 2, None), (3, 1, 70), (20, 1, None)):
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 1, 41, 61], [0, 1, 61, 241]))
    query, key, value = (torch.randn(n, h, 16).half() for n, h in ((61, heads), (241, kv_heads), (241, kv_heads)))
    left, runs = -1 if window is None else window - 1, Runs(cu_q, cu_k, 40, 180)
    packed, logsumexp = attend_packed(query, key, value, cu_q, cu_k, 40, 0.2, left)
    expected = attend_padded(query.float(), key.float(), value.float(), runs, 0.2, window)
    torch.testing.assert_close(packed.float(), expected, rtol=2e-3, atol=2e-3)
    # The weights of one-hot values are those of the keys.
    seen = key[1:61].float().repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("hd,khd->hk", query[40].float(), seen)[:, -60 if window is None else -window :] * 0.2
    torch.testing.assert_close(logsumexp[:, 40], scores.logsumexp(1), rtol=1e-3, atol=1e-3)

    slots, table, pages = rows.page_slots(cu_k, 241, 180, 16)
    in_pages = lambda x: x.new_zeros(pages * 16, kv_heads, 16).index_copy_(0, slots, x).unflatten(0, (-1, 16))
    cache = in_pages(key), in_pages(value)
    if window is not None:
        for part in cache:  # pages of the last run before the window of its first query, which the engine frees
            part[table[2, : (160 - left) // 16]] = torch.nan
    out = torch.full_like(query, torch.nan)
    attend_pages(query, *cache, out, cu_q, cu_k.diff(), table, 40, 0.2, left)
    assert torch.equal(out, packed)
    # The last queries of the last run as the only ones of a sequence each, whose parts have a program each.
    singles, lengths = torch.arange(4, dtype=torch.int32), torch.arange(178, 181, dtype=torch.int32)
    for _ in range(2):  # the first launch leaves nothing behind
        out = torch.full_like(query[58:], torch.nan)
        attend_pages(query[58:], *cache, out, singles, lengths, table[2:].expand(3, -1), 1, 0.2, left)
        torch.testing.assert_close(out, packed[58:], rtol=1e-3, atol=1e-3)
print("equal")
"""


EXPERTS = """
import torch
from colocated_grpo.runtime.row_kernels import choose_experts

torch.manual_seed(0)
logits = torch.randn(10, 12)
logits[0], logits[9] = 0.0, torch.nan
for normalised in (False, True):
    weights, experts = choose_experts(logits, 3, normalised=normalised)
    expected, places = logits[:9].softmax(-1).topk(3)
    torch.testing.assert_close(weights[:9], expected / (expected.sum(-1, keepdim=True) if normalised else 1.0))
    assert torch.equal(experts[1:9].long(), places[1:]) and experts[0].tolist() == [0, 1, 2]
    assert experts.max() < 12  # also in the row of a padded query, which may have any numbers
print("equal")
"""


@pytest.mark.parametrize("script", [ATTENTION, EXPERTS], ids=["attention", "experts"])
def test_the_kernels_of_attention_and_of_the_choice_of_experts_equal_plain_torch(script):
    assert interpreted("-c", script).strip() == "equal"


def test_in_windowed_attention_each_query_is_a_sequence_that_ends_with_its_own_key():
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 3, 8, 9], [0, 3, 20, 53]))
    slots, table, count = page_slots(cu_k, keys=53, longest_k=33, page=16)
    pages = torch.zeros(count * 16, dtype=torch.int64).index_copy_(0, slots, torch.arange(53)).view(count, 16)
    starts, seen, tables = single_queries(cu_q, cu_k.diff(), table, queries=9)
    assert starts.tolist() == [*range(10)]
    own = [0, 1, 2, 15, 16, 17, 18, 19, 52]  # the last queries of a run see its last keys
    first = [0, 0, 0, 3, 3, 3, 3, 3, 20]
    for query, keys in enumerate(seen.tolist()):
        assert pages[tables[query]].flatten()[:keys].tolist() == [*range(first[query], own[query] + 1)]
