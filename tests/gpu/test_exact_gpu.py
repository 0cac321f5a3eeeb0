"""`numerics: exact` on a Hopper GPU: the policy computes the engine's log-probabilities to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from colocated_grpo.metrics import Metrics
from colocated_grpo.policy import exact
from colocated_grpo.policy.attention_kernels import Runs
from colocated_grpo.rollout.vllm.row_operators import make_attention
from colocated_grpo.runtime import rows
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.norm_kernels import normalize
from colocated_grpo.runtime.row_attention import PART
from colocated_grpo.runtime.row_kernels import matmul
from colocated_grpo.settings.exact import EXACT_TYPES
from colocated_grpo.tracking import files
from colocated_grpo.types import Completion
from tests.support import sums
from tests.support.engines import Pair, request_of
from tests.support.families import SETTINGS
from tests.support.random_models import make_model
from tests.support.ranks import run_on_ranks
from tests.support.real_models import real_model
from tests.support.small_policy import INIT_STD, SHAPE, config_of, pack_for, policy_of, random_groups
from tests.support.training_runs import Row, launch, settings, tiny_model

pytestmark = pytest.mark.gpu

FAMILIES = sorted(kind.removesuffix("_text") for kind in EXACT_TYPES)
HEADS = {"gemma3": 256, "llama": 64}
"""Head sizes of released models; 128 for other families. Tiles of attention have 32 keys for 256, otherwise 64."""
EXACT = {"numerics": "exact", "policy": {"compile": "auto"}, "engine": {"enforce_eager": False}}
ROLLOUT = {"prompts_per_step": 8, "group_size": 6, "max_prompt_tokens": 24, "max_completion_tokens": 40}


def assert_exact(steps: list[Row], count: int) -> None:
    assert [row["step"] for row in steps] == list(range(count))
    assert [row["mismatch/max"] for row in steps] == [0.0] * count


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_policy_agree_to_the_last_bit_in_every_step(family, lora, tmp_path):
    model = tiny_model(family, head_dim=HEADS.get(family, 128), edits=SETTINGS.get(family))
    policy = {"compile": "auto", "lora": lora}
    config = settings(model, **EXACT | {"policy": policy, "rollout": ROLLOUT, "training_steps": 3})
    assert_exact(launch(tmp_path, config, gpus=1).rows(files.TRAIN), 3)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "chat"), [("smollm2", True), ("gemma3", False)])
def test_a_pretrained_model_agrees_to_the_last_bit(model, chat, tmp_path):
    config: dict[str, Any] = {
        "model": str(real_model(model)),
        "environments": [sums.entry(tmp_path, 200, chat)],
        "training_steps": 5,
        "rollout": {"max_prompt_tokens": 96, "max_completion_tokens": 700, "temperature": 0.8},
        "numerics": "exact",
        "run_name": "run",
    }
    assert_exact(launch(tmp_path, config, gpus=1).rows(files.TRAIN), 5)


def by_tokens_at_once(world: World, folder: Path) -> tuple[list[list[Completion]], list[int]]:
    """Return the completions, and the steps that sampled several tokens, for each number of tokens at once."""
    from colocated_grpo.rollout.vllm import patches, steady_decode  # import vLLM, which the ranks alone need

    pair = Pair(world, folder, numerics="exact", engine={"enforce_eager": False, "max_num_seqs": 20})
    pair.engine.wake("weights")
    pair.write()
    pair.engine.wake("kv_cache")
    requests = [
        request_of(n, n, prompt=[5 + n, 9, 11][: 1 + n % 3], max_tokens=7 + 2 * n, stop_token_ids=(3, 7))
        for n in range(24)
    ]
    completions, hits = [], []
    for tokens in (1, 3, steady_decode.MOST_STEPS):
        steady_decode.MOST_STEPS = tokens
        completions.append(pair.generate(requests))
        hits.append(patches.STEADY_SAMPLE.hits)
    pair.engine.close()
    return completions, hits


def test_completions_do_not_depend_on_how_many_tokens_are_decoded_at_once():
    [(completions, hits)] = run_on_ranks(by_tokens_at_once, 1, tiny_model("llama", head_dim=64), timeout=300.0)
    one_by_one, *several = completions
    assert all(each == one_by_one for each in several)
    assert {one.finish_reason for one in one_by_one} == {"stop", "length"}
    assert 0 == hits[0] < hits[1] < hits[2]


def small_model(folder: Path) -> Path:
    return make_model(folder / "model", architecture="llama", shape=replace(SHAPE, head_dim=64), init_std=INIT_STD)


def test_log_probabilities_do_not_depend_on_the_micro_batch(world, tmp_path):
    config = config_of(small_model(tmp_path), numerics="exact")
    policy, groups = policy_of(config, world), random_groups(3, 3)

    def scored(size: int) -> torch.Tensor:
        (minibatch,) = pack_for(world, groups, config.with_values("batch", max_tokens_per_micro_batch=size)).minibatches
        # Micro-batches order the sequences differently.
        return torch.cat([policy.score(each) for each in minibatch.micro_batches]).sort().values

    assert torch.equal(scored(32), scored(1024))


def test_gradients_are_as_close_to_those_of_float32_as_with_fast_numerics(world, tmp_path):
    folder = small_model(tmp_path)
    expected = gradients(world, folder, "fast", "float32")
    fast, exact = (gradients(world, folder, numerics, "bfloat16") for numerics in ("fast", "exact"))
    assert (exact - expected).norm() < 1.2 * (fast - expected).norm()


def gradients(world: World, folder: Path, numerics: str, dtype: str) -> torch.Tensor:
    config = config_of(folder, numerics=numerics, policy={"compute_dtype": dtype, "compile": False})
    policy = policy_of(config, world)
    policy.forward_backward(pack_for(world, random_groups(3, 3), config).minibatches[0], Metrics(world.device))
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters().values()])


@pytest.mark.parametrize("vocabulary", [151_936, 49_152, 100_283])
def test_training_scores_a_token_with_the_bits_of_the_sampler(vocabulary):
    """For any number of rows, and also if vLLM has divided the logits by the temperature."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

    from colocated_grpo.runtime.logit_kernels import row_statistics, sample

    generator, count = torch.Generator("cuda").manual_seed(0), 300
    padded = -(-vocabulary // 64) * 64
    logits = (4 * torch.randn(count, padded, device="cuda", generator=generator))[:, :vocabulary]
    rows = torch.arange(count, dtype=torch.int32, device="cuda")
    seeds = positions = rows.long()
    for value in (1.0, 0.7, 1.3):
        temperature = torch.full((count,), value, device="cuda")
        tokens, logprobs = sample(logits, rows, temperature, seeds, positions, divide=True)
        assert torch.equal(row_statistics(logits, tokens, temperature)[0], logprobs)
        assert torch.equal(sample(logits[:3], rows, temperature, seeds, positions, divide=True)[1], logprobs[:3])
        divided = torch.empty(count, padded, device="cuda")[:, :vocabulary].copy_(logits)
        apply_temperature(divided, rows, temperature)  # in place
        same_tokens, same_logprobs = sample(divided, rows, temperature, seeds, positions)
        assert torch.equal(same_tokens, tokens)
        assert torch.equal(same_logprobs, logprobs)


@pytest.mark.parametrize("depth", [576, 640, 2048])
def test_a_row_of_a_product_or_a_norm_does_not_depend_on_the_other_rows(depth):
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(n, depth, device="cuda", generator=generator).bfloat16() for n in (5000, 1000))
    residual = torch.randn(x.shape, device="cuda", generator=generator).bfloat16()
    total = x + residual
    product, norm = matmul(x, weight), normalize(total, weight[0], 1e-6, 0.0)
    for count in (1, 3, 16, 17, 64, 257, 1025, 4096):
        assert torch.equal(matmul(x[:count], weight), product[:count])
        assert torch.equal(matmul(x[:count], weight[128:400]), product[:count, 128:400])
        some = normalize(x[:count], weight[0], 1e-6, 0.0, residual=residual[:count].clone())
        assert torch.equal(some, norm[:count])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 1, 256), (16, 8, 128), (9, 3, 64)])
def test_heads_are_normalised_and_rotated_with_the_bits_of_the_engine(heads, kv_heads, size):
    from vllm import _custom_ops as ops

    from colocated_grpo.rollout.vllm.qkv_kernel import Cache, normalize_rotate_and_store
    from tests.support.decode_kernels import small_attention

    generator, tokens = torch.Generator("cuda").manual_seed(0), 300
    attention = small_attention(generator, heads, kv_heads, size)
    norms, table = (attention.q_norm, attention.k_norm), attention.rotary_emb.cos_sin_cache
    positions = torch.randint(0, 4096, (tokens,), device="cuda", generator=generator)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device="cuda", generator=generator).bfloat16()
    sizes = [heads * size, kv_heads * size, kv_heads * size]
    parts = [part.unflatten(1, (-1, size)) for part in qkv.clone().split(sizes, 1)]
    trained = [
        normalize(part.contiguous(), norm.weight, 1e-6, 0.0, positions, table)
        for part, norm in zip(parts, norms, strict=False)
    ]
    separate = [normalize(part, norm.weight, 1e-6, 0.0) for part, norm in zip(parts, norms, strict=False)]
    ops.rotary_embedding(positions, *(part.flatten(1) for part in separate), size, table, True)
    blocks = qkv.new_zeros(tokens // 10, kv_heads, 10, 2 * size)
    normalize_rotate_and_store(attention, qkv, positions, Cache(blocks, torch.arange(tokens, device="cuda")))
    cached = blocks.transpose(1, 2).flatten(0, 1)
    assert torch.equal(trained[0], separate[0])
    assert torch.equal(trained[0].flatten(1), qkv[:, : heads * size])
    assert torch.equal(trained[1], separate[1])
    assert torch.equal(torch.cat([trained[1], parts[2]], -1), cached)


@pytest.mark.parametrize("window", [3, 100, None])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 1, 256), (8, 2, 128), (9, 3, 64)])
def test_attention_while_training_has_the_bits_of_decoding_one_token_at_a_time(heads, kv_heads, size, window):
    lengths = [1, 40, 129, 2 * PART + 70]
    generator = torch.Generator("cuda").manual_seed(0)
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    query, key, value = (
        torch.randn(sum(lengths), count, size, device="cuda", generator=generator).bfloat16()
        for count in (heads, kv_heads, kv_heads)
    )
    packed = exact._attend(query, key, value, Runs(ends, ends, max(lengths), max(lengths)), None, window)
    slots, table, pages = rows.page_slots(ends, len(key), max(lengths), 16)
    cache = [
        each.new_zeros(pages * 16, *each.shape[1:]).index_copy_(0, slots, each).unflatten(0, (pages, 16))
        for each in (key, value)
    ]
    for run, length in enumerate(lengths):
        own = slice(int(ends[run]), int(ends[run + 1]))
        ends_of_prompts = sorted({0, min(33, length), min(50, length)})
        decoded = by_steps(query[own], cache, table[run : run + 1], ends_of_prompts, window)
        assert torch.equal(decoded, packed[own])
    assert torch.equal(decoded, by_steps(query[own], cache, table[run : run + 1], [0, length], window))


def by_steps(
    query: torch.Tensor, cache: Sequence[torch.Tensor], table: torch.Tensor, ends: Sequence[int], window: int | None
) -> torch.Tensor:
    """Attend as the engine does for one sequence: to the prompt in steps with these ends, then all others at once, each
    as the only query of a sequence."""
    attend = make_attention(None, lambda: None)
    left = -1 if window is None else window - 1
    rest = torch.arange(ends[-1], len(query) + 1, dtype=torch.int32, device="cuda")
    steps = [([begin, end], [end]) for begin, end in pairwise(ends)]
    steps = [[torch.tensor(n, dtype=torch.int32, device="cuda") for n in step] for step in steps] + [[rest, rest[1:]]]
    out = torch.empty_like(query)
    for boundaries, seen in steps:
        if not len(seen):
            continue
        begin, end = int(boundaries[0]), int(boundaries[-1])
        attend(
            q=query[begin:end].contiguous(),
            k=cache[0],
            v=cache[1],
            out=out[begin:end],
            cu_seqlens_q=boundaries - begin,
            seqused_k=seen.contiguous(),
            block_table=table.expand(len(seen), -1),
            max_seqlen_q=int(boundaries.diff().max()),
            causal=True,
            window_size=[left, -1 if left < 0 else 0],
            softmax_scale=query.shape[-1] ** -0.5,
        )
    return out
