"""Training with an engine server on CUDA devices: the server has the policy's weights after each kind of sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.workload import MAX_PROMPT_TOKENS
from colocated_grpo.tracking import files
from tests.support.training_runs import TrainingRun, launch, settings, tiny_model

STEPS = 4
FRESH = 0.02
"""Difference of log-probabilities between bfloat16 kernels."""


def served(folder: Path, bridge: str, *flags: str, gpus: int, **changes: Any) -> TrainingRun:
    """Train with a server that the launcher starts."""
    policy = {"policy": {"lora": {"rank": 8}}} if bridge == "adapter" else {}
    wanted = {
        # Rewards that differ within every group, so that every step moves the weights.
        "environments": [{"type": "task", "name": "benchmarks.workload:RandomWork"}],
        "engine": {"placement": "server", "bridge": bridge, "enforce_eager": False, "max_num_seqs": 32},
        "training_steps": STEPS,
        "evaluation": {"every": 0},
        "rollout": {"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_completion_tokens": 16, **changes.pop("rollout", {})},
        **policy,
        **changes,
    }
    return launch(folder, settings(tiny_model(head_dim=64), **wanted), *flags, gpus=gpus)


def assert_agrees(run: TrainingRun) -> None:
    rows = run.rows(files.TRAIN)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["grad_norm"] > 0 and row["staleness"] == 0 for row in rows)
    assert all(row["mismatch/plain"] < FRESH for row in rows), rows


@pytest.mark.gpu
@pytest.mark.parametrize("bridge", ["shared", "adapter", "restart"])
def test_a_server_on_the_ranks_own_gpu_has_the_policys_weights(tmp_path, bridge):
    assert_agrees(served(tmp_path, bridge, gpus=1))


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("bridge", ["broadcast", "adapter"])
def test_a_server_on_a_gpu_of_its_own_has_the_policys_weights(tmp_path, bridge):
    assert_agrees(served(tmp_path, bridge, "--engine-gpus", "1", gpus=2))


@pytest.mark.multigpu(2)
def test_batches_generated_while_the_policy_trains_are_one_version_old(tmp_path):
    run = served(tmp_path, "broadcast", "--engine-gpus", "1", gpus=2, rollout={"max_staleness": 1})
    assert [row["staleness"] for row in run.rows(files.TRAIN)] == [0, 1, 1, 1]


@pytest.mark.multigpu(3)
def test_a_tensor_parallel_server_has_the_policys_weights(tmp_path):
    engine = {"placement": "server", "bridge": "broadcast", "tensor_parallel_size": 2, "max_num_seqs": 32}
    assert_agrees(served(tmp_path, "broadcast", "--engine-gpus", "2", gpus=3, engine=engine))
