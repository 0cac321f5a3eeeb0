"""Sequences that share prefixes as turns and branches do have the loss and the gradients that they have alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from colocated_grpo.batching.pack import Batch
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.schema import Config
from colocated_grpo.types import Group
from tests.support.families import SETTINGS
from tests.support.small_policy import (
    assert_same,
    config_of,
    gradients_of,
    group_of,
    make_small_model,
    pack_for,
    policy_of,
    random_trees,
)

FAMILIES = ["qwen3", "gemma2", "gpt_oss", "deepseek_v3"]
"""Full attention; windows and capped scores; windows, sinks and experts; latent attention."""


def computed(policy: Policy, groups: Sequence[Group], config: Config, world: World) -> tuple[dict, dict, Batch]:
    """Return gradients, metrics and the batch of one minibatch."""
    batch = pack_for(world, groups, config)
    metrics = Metrics(world.device)
    policy.forward_backward(batch.minibatches[0], metrics)
    gradients = gradients_of(policy)
    for parameter in policy.parameters().values():
        parameter.grad = None
    return gradients, reduce(metrics, world.sum_, world.max_), batch


def alone(groups: Sequence[Group]) -> list[Group]:
    """Return each sequence as a group of its own, so that no prefix is shared."""
    return [group_of(i, [one]) for i, one in enumerate(one for group in groups for one in group.rollouts)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_has_the_loss_and_the_gradients_of_its_sequences_alone(world, tmp_path, family):
    folder = make_small_model(tmp_path / family, family, edits=SETTINGS[family])
    loss = {"type": "grpo", "kl": {"coef": 0.1, "target": "rollout"}, "correction": {"mode": "truncate"}}
    whole, cut = (config_of(folder, loss=loss, batch={"max_tokens_per_micro_batch": n}) for n in (4096, 32))
    policy = policy_of(whole, world)
    for seed in range(3):
        groups = random_trees(1 + seed, seed)
        expected, wanted, unshared = computed(policy, alone(groups), whole, world)
        for config in (whole, cut):
            found, metrics, batch = computed(policy, groups, config, world)
            assert (len(batch.minibatches[0].micro_batches) > 1) == (config is cut), "also the only group is cut"
            assert_same(found, expected, rtol=1e-5, atol=1e-5 * max(g.abs().max().item() for g in expected.values()))
            assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            assert batch.computed_tokens < 0.8 * unshared.computed_tokens
