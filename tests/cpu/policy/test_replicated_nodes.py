"""HSDP (`policy.replicate: nodes`): four ranks as two nodes of two train like four shards, and share checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from colocated_grpo.checkpoint.checkpoints import Checkpoints
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World, mesh_of_nodes, whole
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.rules import check_world
from colocated_grpo.weights.buckets import count_shards, full_tensors, gather, make_buckets
from tests.support.ranks import run_on_ranks, with_nodes
from tests.support.small_policy import (
    assert_same,
    config_of,
    gradients_of,
    pack_for,
    policy_of,
    random_groups,
    train,
    weights_of,
)

LAYOUTS = {"all ranks": None, "2 x 2": 2}
"""Ranks of a node; None: without replicas."""
POLICY = {"lr": 1e-2, "grad_clip": 0.1, "optimizer": {"eps": 1e-3}}


def state_of(policy: Policy) -> dict[str, torch.Tensor]:
    """Return the whole optimizer state."""
    return {
        f"{name}.{key}": whole(value).clone()
        for name, state in policy.optimizer_states().items()
        for key, value in state.items()
    }


def gathered(policy: Policy) -> dict[str, torch.Tensor]:
    """Return the weights as the sync gathers them."""
    parameters = {name: p.detach() for name, p in policy.weights.published().items()}
    shapes = {name: p.shape for name, p in parameters.items()}
    buckets = make_buckets(shapes, count_shards(parameters), torch.float32)
    every = (full_tensors(b, gather(b, parameters, policy.device)) for b in buckets)
    return {name: tensor for bucket in every for name, tensor in bucket}


def own_rows(policy: Policy) -> int:
    return sum(p.to_local().numel() for p in policy.parameters().values() if isinstance(p, DTensor))


def trained(world: World, folder: Path, groups, checkpoints: Path) -> dict:
    """Train in each layout, save, and go on; then resume each checkpoint in each layout."""
    results: dict = {}
    config = config_of(folder, loss={"type": "grpo"}, policy=POLICY)
    batch = pack_for(world, groups, config)
    worlds = {layout: with_nodes(world, ranks) if ranks else world for layout, ranks in LAYOUTS.items()}
    for layout, own in worlds.items():
        policy = policy_of(config, own)
        policy.forward_backward(batch.minibatches[0], Metrics(own.device))
        gradient = gradients_of(policy)
        policy.optimizer.zero_grad()
        metrics = train(policy, batch, 2)
        saved = Checkpoints(checkpoints / layout, config.checkpoint, own)
        saved.save(2, policy, {})
        saved.wait()
        results[layout] = {
            "gradient": gradient,
            "metrics": reduce(metrics, own.sum_, own.max_),
            "weights": weights_of(policy),
            "state": state_of(policy),
            "gathered": gathered(policy),
            "rows": own_rows(policy),
        }
        train(policy, batch, 2)
        results[layout]["later"] = weights_of(policy)
    for source in LAYOUTS:
        for layout, own in worlds.items():
            policy = policy_of(config, own)
            Checkpoints(checkpoints / source, config.checkpoint, own).restore(policy)
            resumed = {"weights": weights_of(policy), "state": state_of(policy)}
            train(policy, batch, 2)
            results[source, layout] = resumed | {"later": weights_of(policy)}
    config = config_of(folder, policy={**POLICY, "optimizer": {"type": "adafactor"}})
    for layout, own in worlds.items():
        policy = policy_of(config, own)
        train(policy, batch, 2)
        results["adafactor", layout] = weights_of(policy)
    return results


@pytest.fixture(scope="module")
def results(model_folder, tmp_path_factory) -> list[dict]:
    """By rank."""
    return run_on_ranks(trained, 4, model_folder(), random_groups(4, 3), tmp_path_factory.mktemp("checkpoints"))


def test_gradient_norm_and_update_equal_those_of_shards_over_all_ranks(results):
    for result in results:
        replicated, sharded = result["2 x 2"], result["all ranks"]
        assert max(g.abs().max() for g in sharded["gradient"].values()) > 1e-3
        assert_same(replicated["gradient"], sharded["gradient"], rtol=1e-5, atol=1e-6)
        assert replicated["metrics"] == pytest.approx(sharded["metrics"], rel=1e-5, abs=1e-6)
        assert sharded["metrics"]["grad_norm"] > POLICY["grad_clip"], "the gradient is clipped"
        for part in ("weights", "state", "later"):
            assert_same(replicated[part], sharded[part], rtol=1e-5, atol=1e-5)
        assert_same(result["adafactor", "2 x 2"], result["adafactor", "all ranks"], rtol=1e-5, atol=1e-5)


def test_each_node_holds_the_whole_model_once(results):
    total = sum(result["all ranks"]["rows"] for result in results)
    rows = [result["2 x 2"]["rows"] for result in results]
    assert (sum(rows[:2]), sum(rows[2:])) == (total, total)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_have_the_same_weights_bit_for_bit_and_the_sync_gathers_them(results, layout):
    first = results[0][layout]
    for result in results:
        for part in ("weights", "later", "gathered"):
            assert_same(result[layout][part], first["weights" if part == "gathered" else part], rtol=0, atol=0)


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_one_layout_resumes_in_the_others(results, source, layout):
    saved, resumed = results[0][source], results[0][source, layout]
    for part in ("weights", "state"):
        assert_same(resumed[part], saved[part], rtol=0, atol=0)
    tolerance = 0 if source == layout else 1e-5
    assert_same(resumed["later"], saved["later"], rtol=tolerance, atol=tolerance)


def uneven(world: World) -> str:
    os.environ |= {"LOCAL_WORLD_SIZE": "2" if world.rank < 2 else "1", "LOCAL_RANK": str(world.rank % 2)}
    with pytest.raises(ConfigError) as error:
        mesh_of_nodes(world.device, world.control)
    return str(error.value)


def test_nodes_with_different_numbers_of_ranks_are_one_line():
    rule = "every node needs the same number of ranks, numbered node by node; the nodes have 2, 1"
    assert run_on_ranks(uneven, 3) == [f"policy.replicate=nodes: {rule}"] * 3


@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "line"),
    [
        (4, 4, "needs several nodes, and this run has one; leave it out"),
        (3, 2, "every node needs the same number of ranks, but 3 is not a multiple of 2"),
    ],
)
def test_settings_that_do_not_fit_the_nodes_are_one_line(tmp_path, ranks, ranks_per_node, line):
    config = config_of(tmp_path, policy={"replicate": "nodes"})
    with pytest.raises(ConfigError, match=f"^policy.replicate=nodes: {line}$"):
        check_world(config, ranks, ranks_per_node)
    check_world(config, 4, 2)
    check_world(config_of(tmp_path), ranks, ranks_per_node)
