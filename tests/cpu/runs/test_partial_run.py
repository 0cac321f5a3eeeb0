"""Partial rollouts in a whole run on two ranks: what is trained, and an exact resume with unfinished groups."""

from __future__ import annotations

import json

from colocated_grpo.tracking import files
from tests.support.served_runs import PARTIAL, work, write_task
from tests.support.training_runs import assert_resumes_exactly, train

STEPS = 8


def test_a_run_with_partial_rollouts_resumes_bit_for_bit(tmp_path):
    config = work(write_task(tmp_path), rollout=PARTIAL, training_steps=STEPS, checkpoint={"every": 3, "keep_last": 10})
    whole = train(tmp_path / "whole", config, ranks=2)
    rows = whole.rows(files.TRAIN)
    assert any(0 < row["staleness/tokens"] < 1 for row in rows), "completions were continued with newer weights"
    assert max(row["staleness/max"] for row in rows) <= PARTIAL["partial"]["max_age"]
    assert rows[-1]["partial/completions"] == 0
    assert all(row["grad_norm"] > 0 for row in rows)
    assert max(row["mismatch/plain"] for row in rows if not row["staleness/tokens"]) < 1e-4
    kept = json.loads((whole.folder / "checkpoints/step_000003/trainer.json").read_text())["state"]["source"]["pending"]
    surplus = (PARTIAL["partial"]["oversample"] - 1) * config["rollout"]["prompts_per_step"]
    assert [len(groups) for groups in kept] == [surplus / 2] * 2
    assert_resumes_exactly(whole, tmp_path / "resumed", config, first_step=3, ranks=2)
