"""Runs that train a model with linear attention: engine and policy agree in bfloat16, and resume is exact."""

from __future__ import annotations

import pytest

from colocated_grpo.benchmarks.workload import MAX_PROMPT_TOKENS, TASK
from colocated_grpo.tools import compare_runs
from colocated_grpo.tracking import files
from tests.support.families import LARGE_STATES, SETTINGS
from tests.support.training_runs import ForkedRun, Settings, TrainingRun, settings, tiny_model, train, weights_of

STEPS = 3
MODEL = "qwen3_next"


def with_states() -> Settings:
    return settings(
        tiny_model(MODEL, head_dim=64, edits=SETTINGS[MODEL] | LARGE_STATES),
        deterministic=True,
        environments=[{"type": "task", "name": TASK}],  # rewards differ at once, so that every step moves the weights
        rollout={"max_prompt_tokens": MAX_PROMPT_TOKENS},
        training_steps=STEPS,
        policy={"lr": 2e-3, "compute_dtype": "bfloat16"},
        evaluation={"every": 0},
        checkpoint={"every": 1},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> TrainingRun:
    return train(tmp_path_factory.mktemp("whole"), with_states())


def test_engine_and_policy_agree_while_the_weights_move(whole):
    rows = whole.rows(files.TRAIN)
    assert len(rows) == STEPS
    for row in rows:
        assert row["freshness/mean_diff"] < 0.03
        assert row["mismatch/on_policy"] < 0.03
        assert row["grad_norm"] > 0


def test_a_killed_run_resumes_bit_for_bit(whole, tmp_path):
    with ForkedRun(tmp_path, with_states()) as run:
        run.wait_for_step(0)
        run.kill()
    resumed = train(tmp_path, with_states(), "--resume", "auto")
    assert weights_of(resumed) == weights_of(whole)
    assert compare_runs.main([str(resumed.folder), str(whole.folder), "--assert-equal"]) == 0
