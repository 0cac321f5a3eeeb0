"""Compiled blocks with experts: all layers share one graph, which computes what the blocks compute uncompiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colocated_grpo.batching.micro_batch import MicroBatch, PackedRoutes
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy.activations import StepSettings, run_trial_step
from colocated_grpo.policy.blocks import blocks_of
from colocated_grpo.policy.policy import Policy
from colocated_grpo.policy.routing import routers_of
from colocated_grpo.runtime.distributed import World
from tests.support.compiled_blocks import graph_counter
from tests.support.families import SETTINGS
from tests.support.small_policy import config_of, gradients_of, pack_for, policy_of, random_groups, with_old_logprobs

EXPERTS, CHOSEN = 6, 2
SIZES = {"hidden_size": 32, "layer_types": None, "num_experts": EXPERTS, "n_routed_experts": EXPERTS}
"""Rows of whole 16 bytes, which products of experts need in bfloat16. The compiler takes equal sizes for one: a trial
has 3 sequences and 4 boundaries, so there are other numbers of experts and of layers with experts."""


def computed(world: World, folder: Path, *, compiled: bool, checkpointed: bool) -> tuple[dict[str, Tensor], list[Any]]:
    """Return gradients and metrics of minibatches of different lengths, with recorded experts and load balancing.

    A trial step without recorded experts comes first, as in a run.
    """
    config = config_of(
        folder,
        policy={
            "compile": compiled,
            "compute_dtype": "bfloat16",
            "gradient_checkpointing": checkpointed,
            "routing_replay": True,
            "load_balancing": 0.01,
        },
        batch={"max_tokens_per_micro_batch": 64},
    )
    policy, metrics = policy_of(config, world), []
    run_trial_step(policy, StepSettings.of(config), tokens=StepSettings.of(config).trial_sizes()[0])
    for groups, group_size in ((7, 1), (3, 2)):  # a group of one has no common prefix
        minibatch = pack_for(world, random_groups(groups, group_size), config).map(with_old_logprobs).minibatches[0]
        routed = [with_random_routes(micro_batch, policy) for micro_batch in minibatch.micro_batches]
        added = Metrics(world.device)
        policy.forward_backward(replace(minibatch, micro_batches=routed), added)
        metrics.append(reduce(added, world.sum_, world.max_))
    return gradients_of(policy), metrics


def with_random_routes(micro_batch: MicroBatch, policy: Policy) -> MicroBatch:
    tokens, generator = micro_batch.tokens, torch.Generator().manual_seed(0)
    layers = len(routers_of(blocks_of(policy.model)))
    order = torch.rand(layers, tokens.num_tokens, EXPERTS, generator=generator).argsort(-1)
    routes = PackedRoutes(order[..., :CHOSEN].to(torch.uint8), torch.rand(tokens.num_tokens, generator=generator) < 0.8)
    return replace(micro_batch, tokens=replace(tokens, routes=routes))


@pytest.mark.parametrize(("architecture", "checkpointed", "kinds"), [("qwen3_moe", True, 1), ("glm4_moe", False, 2)])
def test_layers_with_replay_and_load_balancing_share_one_graph_of_either_gradient_mode(
    world, model_folder, monkeypatch, architecture, checkpointed, kinds
):
    """kinds: of layers; GLM-4.5 has dense ones as well. The experts' use is counted without gradients."""
    folder = model_folder(architecture, edits=SETTINGS[architecture] | SIZES | {"num_hidden_layers": 4 + kinds})
    num_graphs = graph_counter(monkeypatch)
    expected, expected_metrics = computed(world, folder, compiled=False, checkpointed=checkpointed)
    assert num_graphs() == 0
    actual, metrics = computed(world, folder, compiled=True, checkpointed=checkpointed)
    assert num_graphs() == 2 * kinds
    assert metrics == expected_metrics
    assert all(0.1 < one["mismatch/routes"] < 1 < one["loss/load_balancing"] for one in metrics)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
