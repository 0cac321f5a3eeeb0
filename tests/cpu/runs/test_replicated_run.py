"""A run with a replica of the model on each of two nodes trains like one that shards the model over both."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from colocated_grpo.tracking import files
from tests.support.training_runs import (
    ForkedRun,
    checkpoint_tensors,
    deterministic,
    uninterrupted,
    without_wall_clock,
)

ONE_RANK_A_NODE = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def test_a_run_with_a_replica_on_each_node_trains_like_one_without(tmp_path):
    """The sync is among what is compared: after each, engine and policy score the same tokens."""
    config = deterministic(training_steps=5, policy={"replicate": "nodes"})
    with ForkedRun(tmp_path, config, ranks=2, environment=ONE_RANK_A_NODE) as run:
        run.finish()
    rows = without_wall_clock(run.rows(files.TRAIN))
    assert len(rows) == 5 and max(row["grad_norm"] for row in rows) > 0
    for row, expected in zip(rows, without_wall_clock(uninterrupted(2).rows(files.TRAIN)), strict=False):
        assert row.pop("kind") == expected.pop("kind")
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)
    exported, saved = load_file(run.folder / "final_model/model.safetensors"), checkpoint_tensors(run.folder)
    assert all(torch.equal(exported[name], saved[f"model.{name}"]) for name in exported)


def test_replicas_without_nodes_are_one_line_before_a_model_is_read(tmp_path):
    with ForkedRun(tmp_path, deterministic(policy={"replicate": "nodes"}), ranks=2) as run:
        assert run.wait() == 2
    assert run.stderr == "error: policy.replicate=nodes: needs several nodes, and this run has one; leave it out\n"
