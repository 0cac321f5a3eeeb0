"""Runs that train a model with linear attention: engine and policy agree in bfloat16, and resume is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.workload import MAX_PROMPT_TOKENS, TASK
from colocated_grpo.tools.shapes import TINY
from colocated_grpo.tracking import files
from tests.support.composites import make_composite
from tests.support.families import LARGE_STATES, SETTINGS
from tests.support.training_runs import Settings, TrainingRun, assert_resumes_exactly, settings, tiny_model, train

STEPS = 3
HEAD = 64
ROUNDED = 0.06
"""Largest |engine - policy| log-probability of a sampled token that rounding to bfloat16 explains in these models."""


def work(model: Path | None = None) -> Settings:
    """Return the settings of a deterministic run; without a model, of a small Qwen3-Next."""
    return settings(
        model or tiny_model("qwen3_next", head_dim=HEAD, edits=SETTINGS["qwen3_next"] | LARGE_STATES),
        deterministic=True,
        environments=[{"type": "task", "name": TASK}],  # rewards differ at once, so that every step moves the weights
        rollout={"max_prompt_tokens": MAX_PROMPT_TOKENS},
        training_steps=STEPS,
        policy={"lr": 2e-3, "compute_dtype": "bfloat16"},
        evaluation={"every": 0},
        checkpoint={"every": 1},
    )


def assert_agrees_while_the_weights_move(run: TrainingRun) -> None:
    rows = run.rows(files.TRAIN)
    assert len(rows) == STEPS
    for row in rows:
        assert row["mismatch/plain"] < 0.03
        assert row["grad_norm"] > 0


@pytest.fixture(scope="module")
def next_run(tmp_path_factory) -> TrainingRun:
    return train(tmp_path_factory.mktemp("next"), work())


def test_engine_and_policy_agree_while_the_weights_move(next_run):
    assert_agrees_while_the_weights_move(next_run)


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(next_run, tmp_path):
    assert_resumes_exactly(next_run, tmp_path, work(), first_step=STEPS - 1)


def whole_model(folder: Path, kind: str) -> Path:
    return make_composite(folder / "whole", kind, shape=replace(TINY, head_dim=HEAD), init_std=0.1, edits=LARGE_STATES)


def test_the_text_part_of_a_whole_model_trains_with_its_engine(tmp_path):
    assert_agrees_while_the_weights_move(train(tmp_path, work(whole_model(tmp_path, "qwen3_5"))))


def test_the_text_part_of_a_mixture_trains_and_large_differences_are_those_of_chosen_experts(tmp_path):
    """With the engine's experts, no sampled token differs by more than rounding."""
    config = work(whole_model(tmp_path, "qwen3_5_moe"))
    config["rollout"]["max_completion_tokens"] = 16
    config["policy"]["lr"] = 1e-3
    run = train(tmp_path / "plain", config)
    assert_agrees_while_the_weights_move(run)
    plain = run.rows(files.TRAIN)
    config["policy"]["routing_replay"] = True
    replayed = train(tmp_path / "replayed", config).rows(files.TRAIN)
    assert max(row["mismatch/max"] for row in plain) > 2 * ROUNDED
    assert max(row["mismatch/max"] for row in replayed) < ROUNDED
    assert 0 < max(row["mismatch/routes"] for row in replayed) < 0.05
