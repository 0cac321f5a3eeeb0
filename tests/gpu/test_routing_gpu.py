"""Routing replay on a CUDA device: training uses the experts that the engine's kernels chose."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.workload import MAX_PROMPT_TOKENS, TASK
from colocated_grpo.tracking import files
from tests.support.families import SETTINGS
from tests.support.training_runs import launch, settings, tiny_model

STEPS = 3
MODEL = "qwen3_moe"


def rows_of(folder, **policy: Any) -> list[files.Row]:
    """Return the steps of a run in bfloat16. policy: its settings."""
    config = settings(
        tiny_model(MODEL, head_dim=64, edits=SETTINGS[MODEL]),
        environments=[{"type": "task", "name": TASK}],  # rewards differ at once, so that every step moves the weights
        rollout={"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_completion_tokens": 256, "group_size": 8},
        engine={"enforce_eager": False, "max_num_seqs": 32, "args": {"moe_backend": "triton"}},
        policy=policy,
        training_steps=STEPS,
        evaluation={"every": 0},
    )
    rows = launch(folder, config, gpus=1).rows(files.TRAIN)
    assert len(rows) == STEPS
    assert all(row["grad_norm"] > 0 and row["mismatch/plain"] < 0.02 for row in rows)
    assert not policy or all(0 < row["mismatch/routes"] < 0.2 for row in rows)
    return rows


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[files.Row]:
    return rows_of(tmp_path_factory.mktemp("plain"))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_replayed_routes_bring_policy_and_engine_closer(plain, tmp_path, compiled):
    replayed = rows_of(tmp_path, routing_replay=True, compile=compiled)
    for metric in ("mismatch/kl", "mismatch/max"):  # few tokens of a step may choose other experts
        assert sum(row[metric] for row in replayed) < 0.5 * sum(row[metric] for row in plain)
