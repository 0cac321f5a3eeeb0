"""Runs of a mixture of experts whose policy rounds otherwise than its engine, with and without routing replay."""

from __future__ import annotations

import pytest
import yaml

from benchmarks.workload import MAX_PROMPT_TOKENS, TASK
from colocated_grpo.tracking import files
from tests.support.families import SETTINGS
from tests.support.paths import ROOT
from tests.support.training_runs import Settings, TrainingRun, assert_resumes_exactly, settings, tiny_model, train

STEPS = 3
MODEL = "qwen3_moe"
PAGE = (ROOT / "docs/guides/mixtures.md").read_text()
REPLAY = yaml.safe_load(PAGE.split("## Routing replay", 1)[1].split("```yaml\n", 1)[1].split("```", 1)[0])["policy"]
PLAIN = {"lr": 1e-3, "compute_dtype": "bfloat16", "gradient_checkpointing": True}


def in_bfloat16(*, replay: bool) -> Settings:
    """Settings of a run whose policy computes in bfloat16, and whose engine in float32."""
    return settings(
        tiny_model(MODEL, edits=SETTINGS[MODEL]),
        deterministic=True,
        environments=[{"type": "task", "name": TASK}],  # rewards differ at once, so that every step moves the weights
        rollout={"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_completion_tokens": 48, "group_size": 8},
        training_steps=STEPS,
        policy=PLAIN | REPLAY if replay else PLAIN,
        engine={"dtype": "float32"},
        evaluation={"every": 0},
        checkpoint={"every": 1},
    )


@pytest.fixture(scope="module")
def replayed(tmp_path_factory) -> TrainingRun:
    return train(tmp_path_factory.mktemp("replayed"), in_bfloat16(replay=True), ranks=2)


def test_replayed_routes_bring_policy_and_engine_closer(replayed, tmp_path):
    """A record beside the wrong token would drive them apart."""
    plain = train(tmp_path, in_bfloat16(replay=False), ranks=2)
    without, with_replay = (run.rows(files.TRAIN) for run in (plain, replayed))
    assert len(without) == len(with_replay) == STEPS
    for metric in ("mismatch/kl", "mismatch/max"):  # few tokens of a step may choose other experts
        assert sum(row[metric] for row in with_replay) < 0.4 * sum(row[metric] for row in without)
    assert all(0 < row["mismatch/routes"] < 0.05 and row["grad_norm"] > 0 for row in with_replay)


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(replayed, tmp_path):
    assert_resumes_exactly(replayed, tmp_path, in_bfloat16(replay=True), first_step=STEPS - 1, ranks=2)
