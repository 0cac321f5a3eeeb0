"""Context parallelism: micro-batches that are split over ranks give the gradients of whole ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from colocated_grpo.batching.micro_batch import MicroBatch
from colocated_grpo.batching.pack import Batch
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy.activations import StepSettings, run_trial_step
from colocated_grpo.policy.context_parallel import all_to_all, heads_to_rows, own_heads, rows_to_heads
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World, with_context
from colocated_grpo.settings.schema import Config
from colocated_grpo.trainer import with_ref_logprobs
from colocated_grpo.types import Group
from tests.support.families import HYBRIDS, SETTINGS, WINDOW
from tests.support.ranks import run_on_ranks, with_nodes
from tests.support.small_policy import (
    assert_same,
    config_of,
    gradients_of,
    group_of,
    pack_for,
    policy_of,
    random_groups,
    rollout_of,
    rounding,
    train,
    weights_of,
)

FAMILIES = {name: edits for name, edits in SETTINGS.items() if name not in HYBRIDS} | {
    "gemma3 with soft-capped logits": WINDOW | {"final_logit_softcapping": 2.0}
}
SETTINGS_OF: dict[str, dict[str, Any]] = {
    "checkpointed blocks": {"policy": {"gradient_checkpointing": True}},
    "adapters": {"policy": {"lora": {"rank": 4}}},
    "one trained block": {"policy": {"train_layers": [1]}},
    "weights on the host": {"policy": {"cpu_offload": True}},
    "completion means": {"loss": {"type": "grpo"}},
    "ratios of completions": {"loss": {"type": "gspo"}},
    "corrections of completions": {"loss": {"type": "dapo", "correction": {"level": "sequence"}}},
}
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
Result = tuple[dict[str, Tensor], dict[str, float]]
"""Gradients or weights, and metrics."""
Compute = Callable[[World, Path, dict[str, Any]], Result]


def policy_in(world: World, folder: Path, sections: dict[str, Any]) -> tuple[Policy, Config]:
    """Build a policy in the world's context; its trial step has run. Minibatches have several micro-batches."""
    size = 1 if world.context is None else world.context.size
    policy = {"context_parallel": size, **sections.get("policy", {})}
    batch = {"max_tokens_per_micro_batch": 48, **sections.get("batch", {})}
    config = config_of(folder, **sections | {"policy": policy, "batch": batch})
    built = policy_of(config, world)
    run_trial_step(built, StepSettings.of(config), tokens=16)
    return built, config


def result_of(policy: Policy, batch: Batch, world: World) -> Result:
    metrics = Metrics(world.device)
    policy.forward_backward(batch.minibatches[0], metrics)
    return gradients_of(policy), reduce(metrics, world.sum_, world.max_)


def with_stale_logprobs(micro_batch: MicroBatch) -> MicroBatch:
    """Make the weights before the update differ from those that sampled and from the current ones."""
    inputs = micro_batch.loss_inputs
    return replace(micro_batch, loss_inputs=replace(inputs, old_logprobs_N=0.95 * inputs.sampling_logprobs_N))


def computed(world: World, folder: Path, sections: dict[str, Any]) -> Result:
    policy, config = policy_in(world, folder, sections)
    return result_of(policy, pack_for(world, random_groups(7, 4), config).map(with_stale_logprobs), world)


def routed(world: World, folder: Path, sections: dict[str, Any]) -> Result:
    """Replay random experts. Without siblings, whose common prefix counts once in each micro-batch."""
    policy, config = policy_in(world, folder, sections)
    experts = np.random.default_rng(0).random((64, 2, 4)).argsort(-1)[..., :2].astype(np.uint8)

    def with_routes(group: Group) -> Group:
        return replace(group, rollouts=[replace(r, routes=experts[: len(r.token_ids) - 1]) for r in group.rollouts])

    groups = [with_routes(group) for group in random_groups(24, 1)]
    return result_of(policy, pack_for(world, groups, config).map(with_stale_logprobs), world)


def updated(world: World, folder: Path, sections: dict[str, Any]) -> Result:
    """Take two optimizer steps with log-probabilities of the policy before them, as old ones and as the reference's.

    The samples have the same statistics before the first step and during the steps.
    """
    policy, config = policy_in(world, folder, sections)
    batch = policy.with_old_logprobs(pack_for(world, random_groups(8, 4), config))
    batch = batch.map(lambda micro_batch: with_ref_logprobs(micro_batch, policy.weights, world.device))
    before = Metrics(world.device)
    for minibatch in batch.minibatches:
        before.add(dict(policy.mismatch(minibatch).ordered()))
    metrics = reduce(train(policy, batch), world.sum_, world.max_)
    judged = reduce(before, world.sum_, world.max_)
    trained = {name: value for name, value in metrics.items() if name.startswith("mismatch/")}
    assert "mismatch/kl" in judged and judged == pytest.approx(trained, rel=1e-5)
    return weights_of(policy), metrics


def long_prompts(world: World, folder: Path, sections: dict[str, Any]) -> Result:
    """One group whose first half predicts nothing: with four ranks, two of them have no work at all."""
    policy, config = policy_in(world, folder, sections)
    group = group_of(0, [rollout_of([3] * 12, [4, 5]), rollout_of([3] * 12, [6, 7], reward=1.0)])
    return result_of(policy, pack_for(world, [group], config).map(with_stale_logprobs), world)


def both(
    world: World, size: int, compute: Compute, cases: dict[str, tuple[Path, dict[str, Any]]]
) -> dict[str, tuple[Result, Result]]:
    """Return each case's result with whole and with split micro-batches."""
    split = with_context(world, size)
    return {name: (compute(world, *case), compute(split, *case)) for name, case in cases.items()}


def assert_close(whole: Result, split: Result) -> None:
    (expected, expected_metrics), (actual, metrics) = whole, split
    assert max(tensor.abs().max() for tensor in expected.values()) > 1e-3
    assert_same(actual, expected, rtol=1e-5, atol=rounding(expected))
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def families(model_folder) -> dict[str, tuple[Result, Result]]:
    cases = {name: (model_folder(name.split()[0], edits=edits), {}) for name, edits in FAMILIES.items()}
    return run_on_ranks(both, 2, 2, computed, cases)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_every_family_are_those_of_whole_micro_batches(families, family):
    assert_close(*families[family])


@pytest.fixture(scope="module")
def by_setting(model_folder) -> dict[str, tuple[Result, Result]]:
    cases = {name: (model_folder("qwen3"), sections) for name, sections in SETTINGS_OF.items()}
    return run_on_ranks(both, 2, 2, computed, cases)[0]


@pytest.mark.parametrize("name", SETTINGS_OF)
def test_gradients_are_those_of_whole_micro_batches_with(by_setting, name):
    assert_close(*by_setting[name])


def test_recorded_experts_stay_beside_their_tokens(model_folder):
    folder = model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"])
    cases = {"replay": (folder, {"policy": {"routing_replay": True}})}
    [(whole, split), _] = [of_rank["replay"] for of_rank in run_on_ranks(both, 2, 2, routed, cases)]
    assert 0.5 < whole[1]["mismatch/routes"] < 1
    assert_close(whole, split)


def test_several_updates_use_log_probabilities_of_the_policy_and_the_reference(model_folder):
    sections = {"loss": {"type": "grpo", "kl": {"coef": 0.1}}, "batch": {"minibatches": 2}, "policy": {"lr": 1e-3}}
    cases = {"updates": (model_folder("qwen3"), sections)}
    (whole, split) = run_on_ranks(both, 2, 2, updated, cases)[0]["updates"]
    assert whole[1]["kl"] > 0
    assert split[1] == pytest.approx(whole[1], rel=1e-3, abs=1e-5)
    # AdamW's first steps are as large for small gradients as for large ones: rounding may turn single elements.
    differences = torch.cat([(split[0][name] - tensor).abs().flatten() for name, tensor in whole[0].items()])
    assert (differences > 1e-5).float().mean() < 1e-3


@pytest.mark.parametrize("size", [2, 4])
def test_groups_of_four_ranks(model_folder, size):
    """Four ranks have one of four heads each, and two of them the same key-value head."""
    cases = {"gspo": (model_folder("qwen3", edits=FOUR_HEADS), {"loss": {"type": "gspo"}})}
    for of_rank in run_on_ranks(both, 4, size, computed, cases):
        assert_close(*of_rank["gspo"])


def computed_on_nodes(world: World, folder: Path, sections: dict[str, Any]) -> Result:
    return computed(with_nodes(world, 2), folder, sections)


def test_groups_with_replicas_on_two_nodes(model_folder):
    cases = {"gspo": (model_folder("qwen3"), {"loss": {"type": "gspo"}})}
    for of_rank in run_on_ranks(both, 4, 2, computed_on_nodes, cases):
        assert_close(*of_rank["gspo"])


def test_ranks_without_scored_tokens_and_groups_without_work(model_folder):
    cases = {"long prompts": (model_folder("qwen3"), {})}
    for of_rank in run_on_ranks(both, 4, 2, long_prompts, cases):
        assert_close(*of_rank["long prompts"])


def exchanged(world: World) -> list[dict[str, Tensor]]:
    """Return what the functions give this rank, for more and for fewer key-value heads than ranks."""
    context = with_context(world, 2).context
    assert context is not None
    generator = torch.Generator().manual_seed(world.rank)
    results = []
    for kv_heads in (4, 1):
        shapes = ((3, 4, 6), (3, kv_heads, 6), (3, kv_heads, 5))
        rows = [torch.randn(shape, generator=generator) for shape in shapes]
        query, key, value = rows_to_heads(*rows, context.name)
        back = heads_to_rows(query, context.name)
        results.append({"rows": rows[0], "key rows": rows[1], "query": query, "key": key, "value": value, "back": back})
    results.append({"own": own_heads(torch.arange(4.0), context.name)})
    for dtype in (torch.float32, torch.bfloat16):
        parts = torch.randn(2, 3, 5, generator=generator).to(dtype).requires_grad_()
        torch.library.opcheck(all_to_all, (parts, context.name))
    return results


def test_ranks_exchange_rows_for_heads_and_back():
    (first, first_few, own), (second, second_few, other_own) = run_on_ranks(exchanged, 2)
    rows, keys = (torch.cat([first[name], second[name]]) for name in ("rows", "key rows"))
    for rank, result in enumerate((first, second)):
        heads = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(result["query"], rows[:, heads])
        assert torch.equal(result["key"], keys[:, heads])
        assert result["value"].shape == (6, 2, 5)
        assert torch.equal(result["back"], result["rows"])
    only_head = torch.cat([first_few["key rows"], second_few["key rows"]])
    assert torch.equal(first_few["key"], only_head) and torch.equal(second_few["key"], only_head)
    assert [own["own"].tolist(), other_own["own"].tolist()] == [[0, 1], [2, 3]]


def compiled_and_eager(world: World) -> list[tuple[Tensor, ...]]:
    """Return attention's output and gradients, compiled and not, for two lengths."""
    context = with_context(world, 2).context
    assert context is not None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = rows_to_heads(query, key, value, context.name)
        heads = (tensor.transpose(0, 1) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return heads_to_rows(out.transpose(0, 1), context.name)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    results = []
    for rows in (5, 8):
        shapes = ((rows, 4, 8), (rows, 1, 8), (rows, 1, 8))
        for function in (attend, compiled):
            generator = torch.Generator().manual_seed(world.rank)
            inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
            out = function(*inputs)
            results.append((out.detach(), *torch.autograd.grad(out.square().sum(), inputs)))
    return results


def test_compiled_blocks_compute_the_same_bits():
    for results in run_on_ranks(compiled_and_eager, 2):
        for eager, compiled in zip(results[::2], results[1::2], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
