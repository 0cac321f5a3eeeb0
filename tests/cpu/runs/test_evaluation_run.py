"""Evaluation sets, the best step and dynamic sampling in whole runs: metrics, exact resume, early stop, the tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colocated_grpo.tracking import files
from tests.support.ranks import start_module
from tests.support.training_runs import (
    TIMEOUT,
    Settings,
    TrainingRun,
    assert_resumes_exactly,
    deterministic,
    tiny_model,
    train,
)

STEPS, EVERY, PROMPTS = 6, 2, 4
AGENT = """
from openai import AsyncOpenAI

async def play(item, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}], max_tokens=2)
    return 0.5
"""
REWARD = "def short(completions, **columns):\n    return [float(len(text) < 7) for text in completions]\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Return a folder with rows and with a reward that a random model gets in some completions and soon learns."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "rewards.py").write_text(REWARD)
    (folder / "agent.py").write_text(AGENT)
    for name, first in (("train", 100), ("test", 500)):
        rows = [{"prompt": f"sort {first + row}", "answer": "none"} for row in range(40)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(data: Path, **changes: object) -> Settings:
    reward = {"name": f"{data}/rewards.py:short", "run_in": "thread"}
    test = str(data / "test.jsonl")
    agent = {"type": "agent", "name": test, "program": f"{data}/agent.py:play"}
    sets = [
        {"name": "sampled", "source": test, "rewards": [reward], "samples": 4, "prompts": 12, "answer": "final_answer"},
        {"name": "greedy", "source": test, "rewards": [reward], "temperature": 0, "every": 2 * EVERY},
        {"name": "never", "source": test, "rewards": ["exact_match"], "prompts": 2},
        {"name": "agent", "source": agent, "prompts": 3, "samples": 2, "every": 0},
    ]
    evaluation = {"every": EVERY, "prompts": 4, "sets": sets, "keep_best": "eval/sampled/mean"}
    return deterministic(
        environments=[{"type": "dataset", "name": str(data / "train.jsonl"), "rewards": [reward]}],
        training_steps=STEPS,
        rollout={"group_size": 2, "resample": {"max_rounds": 2}, "skip_solved": {"after": 1}},
        policy={"lr": 1e-2},
        evaluation={**evaluation, **changes},
        checkpoint={"every": EVERY, "keep_last": 1},
    )


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> TrainingRun:
    settings = config(data)
    settings["checkpoint"]["keep_last"] = 10
    return train(tmp_path_factory.mktemp("whole"), settings, ranks=2)


def evaluations(run: TrainingRun, name: str) -> dict[int, float]:
    """Return the values of a metric by step."""
    return {row["step"]: row[name] for row in run.rows(files.EVALUATION) if name in row}


def test_every_set_is_evaluated_before_the_first_step_at_its_interval_and_after_the_last(whole):
    assert list(evaluations(whole, "held_out/reward")) == [0, 2, 4, 6]
    assert list(evaluations(whole, "eval/sampled/mean")) == [0, 2, 4, 6]
    assert list(evaluations(whole, "eval/greedy/mean")) == [0, 4, 6]
    for row in whole.rows(files.EVALUATION):
        if "eval/sampled/mean" in row:
            rates = [row[f"eval/sampled/pass@{k}"] for k in (1, 2, 4)]
            assert rates[0] == pytest.approx(row["eval/sampled/mean"])
            assert rates == sorted(rates)
            assert {"eval/sampled/maj@4", "eval/sampled/length_stderr", "eval/sampled/truncated"} <= row.keys()
    assert set(evaluations(whole, "eval/never/pass@1").values()) == {0.0}


def test_a_step_trains_groups_with_variance_and_counts_what_it_sampled_for_them(whole):
    rows = whole.rows(files.TRAIN)
    for row in rows:
        assert row["groups/constant"] == row["resample/missing"] / PROMPTS
        assert (row["resample/rounds"] > 0) == (row["resample/prompts"] > PROMPTS)
        assert (row["resample/tokens"] > 0) == (row["resample/prompts"] > PROMPTS)
    assert any(row["resample/rounds"] for row in rows)
    assert any(value for row in rows for name, value in row.items() if name.startswith("prompts_skipped/"))


def test_the_best_step_is_kept_and_exported(whole):
    values = evaluations(whole, "eval/sampled/mean")
    best = max(values, key=lambda step: values[step])
    assert best > 0, "the model learned nothing"
    record = {"metric": "eval/sampled/mean", "value": values[best], "step": best}
    assert json.loads((whole.folder / "best.json").read_text()) == record
    assert f"best eval/sampled/mean: {values[best]:.4g} at step {best}" in whole.stdout


def test_a_resumed_run_repeats_evaluations_rounds_and_the_best_step(whole, data, tmp_path):
    """The copy is what a kill after step 2's checkpoint leaves, before the best model of that step was exported."""
    resumed = assert_resumes_exactly(whole, tmp_path, config(data), first_step=EVERY, ranks=2)
    copy = resumed.folder
    assert (copy / "best.json").read_text() == (whole.folder / "best.json").read_text()
    for name in ("model.safetensors", "config.json"):
        assert (copy / "best_model" / name).read_bytes() == (whole.folder / "best_model" / name).read_bytes()
    values = evaluations(resumed, "eval/sampled/mean")
    best = max(list(values)[:-1], key=lambda step: values[step])  # before the last checkpoint
    kept = {path.name for path in (copy / "checkpoints").iterdir()}
    assert best > 0
    assert kept == {f"step_{step:06d}" for step in (best, STEPS)}, "keep_last: 1, and the best one"


def test_a_run_ends_when_its_patience_is_over_and_is_not_trained_further_by_a_resume(data, tmp_path):
    settings = config(data, keep_best="eval/never/mean", patience=2)
    run = train(tmp_path, settings)
    assert_patience_ended(run)
    assert_patience_ended(train(tmp_path, settings, "--resume", str(run.folder)))


def assert_patience_ended(run: TrainingRun) -> None:
    assert [row["step"] for row in run.rows(files.TRAIN)] == [0, 1, 2, 3]
    assert list(evaluations(run, "eval/never/mean")) == [0, 2, 4]
    assert len(run.rows(files.EVALUATION)) == 3 * 3 + 2  # once per step and set
    assert (run.folder / "final_model/config.json").is_file()
    assert not (run.folder / "best_model").exists(), "step 0 is the model that the run started from"
    assert "best eval/never/mean: 0 at step 0 (the model that the run started from); no better one" in run.stdout


def test_the_tool_measures_the_best_model_of_a_run_as_the_run_did(whole, data, tmp_path):
    record = json.loads((whole.folder / "best.json").read_text())
    out, err, results = tmp_path / "out", tmp_path / "err", tmp_path / "new/results.json"
    renamed = ["--evaluation.sets.0.name", "renamed"]  # the run's keep_best names this set
    arguments = [str(whole.folder), "--output", str(results), *renamed]
    with start_module("colocated_grpo.tools.evaluate", arguments, 2, out, err) as ranks:
        codes = ranks.exit_codes(TIMEOUT)
    assert codes == [0, 0], err.read_text()
    greedy = json.loads(results.read_text())["evaluations"]["eval/greedy"]
    measured = evaluations(whole, "eval/greedy/mean")
    if record["step"] in measured:
        assert greedy["metrics"]["eval/greedy/mean"] == measured[record["step"]]
    assert len(greedy["completions"]) == greedy["prompts"] == 40
    assert "eval/renamed: 12 prompts x 4 completions" in out.read_text()
    assert "held_out" not in out.read_text()
    agent = json.loads(results.read_text())["evaluations"]["eval/agent"]
    assert (agent["metrics"]["eval/agent/mean"], agent["metrics"]["eval/agent/errors"]) == (0.5, 0)
    assert len(agent["completions"]) == 3 * 2


def test_the_tool_says_that_a_config_has_nothing_to_evaluate(tmp_path):
    out, err, results = tmp_path / "out", tmp_path / "err", tmp_path / "results.json"
    file = tmp_path / "alone.yaml"
    file.write_text("environments: [{type: dataset, name: rows.jsonl, rewards: [exact_match], held_out: 0}]\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    arguments = [str(tiny_model()), "--config", str(file), "--output", str(results)]
    with start_module("colocated_grpo.tools.evaluate", arguments, 1, out, err) as ranks:
        assert ranks.exit_codes(TIMEOUT) == [2]
    assert "error: evaluation: there are no prompts; set held_out or eval_split" in err.read_text()
    assert not results.exists()
