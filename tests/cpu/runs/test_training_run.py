"""The whole loop with the real engine: metrics, files of the run folder, the final model, and a rising reward."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocated_grpo.tools import make_model
from colocated_grpo.tracking import charts, console, files
from tests.support.paths import ROOT
from tests.support.training_runs import STEPS, settings, tiny_model, train, uninterrupted

GUIDE = ROOT / "docs/guides/metrics.md"
REQUIRED_METRICS = {
    "reward",
    "reward_std",
    "completion_tokens",
    "truncated",
    "staleness",
    "groups/constant",
    "reward_errors",
    "loss",
    "grad_norm",
    "lr",
    "entropy",
    "mismatch/kl",
    "mismatch/max",
    "mismatch/ess",
    "mismatch/plain",
    "clip_fraction/low",
    "clip_fraction/high",
    "tokens_per_second",
    "tokens_per_second/train",
    "prefix_reuse",
    "imbalance",
    "padding",
    "seconds/step",
    "seconds/generate",
    "seconds/sync",
    "seconds/wake",
    "seconds/sleep",
    "seconds/train",
    "memory/generate_gib",
    "memory/train_gib",
}


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"], scope="module")
def run(request):
    return uninterrupted(request.param)


def trained_rows(run) -> list[files.Row]:
    """Return rows of steps that trained: without reward variance in any group there is no forward pass to measure."""
    return [row for row in run.rows(files.TRAIN) if row["groups/constant"] < 1]


def test_every_step_and_every_evaluation_has_a_row(run):
    assert [row["step"] for row in run.rows(files.TRAIN)] == list(range(STEPS))
    assert [row["step"] for row in run.rows(files.EVALUATION)] == list(range(0, STEPS + 1, 4))
    assert all("held_out/reward" in row for row in run.rows(files.EVALUATION))


def test_every_row_has_the_required_metrics_and_all_are_finite(run):
    rows = trained_rows(run)
    assert rows
    for row in rows:
        assert row.keys() >= REQUIRED_METRICS
        assert all(value is not None and math.isfinite(value) for key, value in row.items() if key != "kind")


def test_console_and_charts_use_metrics_that_a_run_writes(run):
    written = set().union(*run.rows(files.TRAIN), *run.rows(files.EVALUATION))
    shown = {key for section in charts.SECTIONS.values() for chart in section for key in chart.lines}
    assert shown - written == {"kl"}  # this run has no KL penalty
    # seconds/other is computed by the console.
    assert {column.key for column in console.COLUMNS} - written == {"kl", "seconds/other"}
    assert set(console.PHASES_WITH_COLUMN) | {f"seconds/{name}" for name in charts.PHASES} <= written


def test_the_guide_explains_every_metric_that_a_run_writes(run):
    written = set().union(*run.rows(files.TRAIN), *run.rows(files.EVALUATION)) - {"kind", "step"}
    explained = set(re.findall(r"`([a-z_/]+)`", GUIDE.read_text()))
    families = ("reward/", "held_out/", *(f"seconds/{phase}" for phase in explained))
    assert {key for key in written - explained if not key.startswith(families)} == set()


def test_the_phases_of_a_step_do_not_overlap(run):
    """The first step also evaluates."""
    for row in run.rows(files.TRAIN):
        phases = {key: value for key, value in row.items() if key.startswith("seconds/") and key != "seconds/step"}
        assert sum(phases.values()) <= row["seconds/step"]
    assert "seconds/evaluate" in run.rows(files.TRAIN)[0]


def test_the_engine_samples_with_the_policys_weights_at_every_step(run):
    for row in trained_rows(run):
        assert row["staleness"] == 0
        assert row["mismatch/max"] < 1e-4
        assert 0 < row["mismatch/plain"] < 1e-4
        assert row["mismatch/ess"] == pytest.approx(1, abs=1e-4)


def test_a_run_writes_its_config_summary_report_and_rollouts(run):
    assert json.loads((run.folder / "summary.json").read_text())["state"] == "finished"
    assert "<svg" in (run.folder / "report.html").read_text()
    assert files.read_config(run.folder)["training_steps"] == STEPS
    assert files.read_rollouts(run.folder)
    assert "report: " in run.stdout
    assert "Traceback" not in run.stderr


def test_the_final_model_loads_and_differs_from_the_initial_one(run):
    folder = run.folder / "final_model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = load_file(tiny_model() / "model.safetensors")
    after = load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert not any(torch.equal(after[name], before[name]) for name in before)
    logits = model(torch.tensor([tokenizer.encode("sort 31")])).logits
    assert logits.isfinite().all()


def test_the_first_evaluation_does_not_depend_on_the_number_of_ranks():
    """Seeds come from the prompt and the sample index, not from the rank that serves them."""
    first, second = (uninterrupted(ranks).rows(files.EVALUATION)[0] for ranks in (1, 2))
    assert first["held_out/completion_tokens"] == second["held_out/completion_tokens"]
    assert first["held_out/reward"] == second["held_out/reward"]


def test_staleness_grows_between_syncs_and_an_evaluation_measures_the_current_weights(tmp_path):
    config = settings(tiny_model(), training_steps=8, sync_frequency=3, evaluation={"every": 5})
    run = train(tmp_path, config)
    assert [row["staleness"] for row in run.rows(files.TRAIN)] == [0, 1, 2, 0, 1, 0, 0, 1]
    evaluated = [row for row in files.read_rollouts(run.folder) if row["kind"] == files.EVALUATION]
    assert {(row["step"], row["policy_version"]) for row in evaluated} == {(0, 0), (5, 5), (8, 8)}


def test_the_reward_rises(tmp_path):
    model = tmp_path / "warm"
    task = {"min_digits": 2, "max_digits": 4}
    arguments = ["--task", "sorting", "--task-args", json.dumps(task), "--shape", "tiny", "--warm-start-target", "0.4"]
    assert make_model.main([str(model), *arguments]) == 0
    config = settings(
        model,
        environments=[{"type": "task", "name": "sorting", "args": task}],
        training_steps=40,
        rollout={"prompts_per_step": 16, "group_size": 8},
        policy={"lr": 1e-3},
        batch={"max_tokens_per_micro_batch": 4096},
        engine={"max_num_seqs": 128},
        evaluation={"every": 40, "prompts": 128},
        checkpoint={"every": 0},
    )
    before, after = (row["held_out/reward"] for row in train(tmp_path, config).rows(files.EVALUATION))
    assert before < 0.6
    assert after > before + 0.15
