"""Training steps as CUDA graphs equal the same steps without graphs, and a run on a small model uses graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy.graphs import GraphedGradient, Replayed
from colocated_grpo.policy.policy import Policy
from colocated_grpo.tools.shapes import TINY
from tests.support.random_models import make_model
from tests.support.small_policy import SHAPE, config_of, pack_for, policy_of, random_groups, weights_of

pytestmark = pytest.mark.gpu

CLOSE = 0.03
"""Relative difference of the change of the weights: padding and atomic additions change the order of sums."""
ROUNDS = 4
MODELS = {
    "all weights": ("qwen3", {}),
    "adapter": ("llama", {"lora": {"rank": 4}}),
    "windows": ("gemma3", {}),
    "not compiled": ("qwen3", {"compile": False}),
}


def train(policy: Policy, config: Any, world: Any) -> list[dict[str, float]]:
    """Take steps on batches of other sizes, two rounds with the same batches. Returns the metrics of each step."""
    rows = []
    for index in [*range(ROUNDS)] * 2:
        [minibatch] = pack_for(world, random_groups(6 + index, 4, seed=index), config).minibatches
        metrics = Metrics(world.device)
        policy.fixed_lr = 1e-3 * (1 + index % 2)
        policy.forward_backward(minibatch, metrics)
        policy.optimizer_step(metrics)
        rows.append(reduce(metrics, world.sum_, world.max_))
    return rows


@pytest.mark.parametrize(("architecture", "settings"), MODELS.values(), ids=MODELS)
def test_steps_with_graphs_equal_steps_without(world, tmp_path, architecture, settings):
    shape = replace(TINY, vocab=SHAPE.vocab, head_dim=64)
    folder = make_model(tmp_path / "model", shape=shape, architecture=architecture, init_std=0.15)
    config = config_of(
        folder,
        policy={"lr": 1e-3, **settings},
        batch={"max_tokens_per_micro_batch": 120},
        rollout={"max_prompt_tokens": 16, "max_completion_tokens": 16},
    )
    plain, graphed = policy_of(config, world), policy_of(config, world)
    graphed.use_graphs()
    gradient = graphed._gradient
    assert isinstance(gradient, GraphedGradient)
    before = weights_of(plain)
    expected, found = train(plain, config, world), train(graphed, config, world)
    assert gradient.replays > ROUNDS
    for work in (graphed._measure_norm, graphed._apply_update):
        assert isinstance(work, Replayed)
        assert work.replays > ROUNDS
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=0.05, abs=0.02)
    after, wanted = weights_of(graphed), weights_of(plain)
    changes = {name: (wanted[name] - before[name]).norm() for name in before}
    assert all(change > 0 for change in changes.values())
    differences = {name: ((after[name] - wanted[name]).norm() / changes[name]).item() for name in before}
    assert max(differences.values()) < 10 * CLOSE, differences  # Adam's sign of near-zero gradients
    assert sum(differences.values()) / len(differences) < CLOSE * 3, differences
