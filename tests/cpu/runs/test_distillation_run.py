"""Runs without any reward: a noisy student comes closer to a teacher, and thereby better at the teacher's task."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from colocated_grpo.environments.registry import build_task
from colocated_grpo.tools.make_model import build_char_tokenizer, build_model, save_model
from colocated_grpo.tools.shapes import TINY
from colocated_grpo.tools.warm_start import TaskTeacher, WarmStart, warm_start
from colocated_grpo.tracking import files
from tests.support.training_runs import settings, train

TASK = {"type": "task", "name": "sorting", "args": {"min_digits": 2, "max_digits": 2}}
STEPS, WINDOW = 12, 3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A student that has learned to sort from a teacher with many slips, and a teacher trained on without slips."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), build_char_tokenizer()
    model, task = build_model(TINY, tokenizer, seed=0), build_task("sorting", TASK["args"])
    for name, slips, steps in (("student", 0.6, 60), ("teacher", 0.0, 75)):
        lesson = WarmStart(max_steps=steps, target=2.0, lr=4e-3, slips=slips)
        warm_start(model, TaskTeacher(task, tokenizer, lesson), lambda *_: None)
        save_model(model, tokenizer, folder / name)
    return folder / "student", folder / "teacher"


def test_the_kl_to_the_teacher_falls_and_the_unseen_reward_rises(tmp_path, models):
    student, teacher = models
    prompts = [{"prompt": prompt} for prompt in sorted({f"sort {n:02}" for n in range(100)})]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    config = settings(
        student,
        environments=[{"type": "dataset", "name": str(tmp_path / "prompts.jsonl"), "rewards": []}],
        loss={"type": "dapo", "kl": {"model": str(teacher), "coef": 1.0, "estimator": "k2"}},
        training_steps=STEPS,
        rollout={"prompts_per_step": 16},
        policy={"lr": 2e-3},
        evaluation={"every": STEPS, "sets": [{"name": "sorting", "source": TASK}]},
        checkpoint={"every": 0, "final": False},
    )
    run = train(tmp_path, config)
    kl = [row["kl"] for row in run.rows(files.TRAIN)]
    assert len(kl) == STEPS and fmean(kl[-WINDOW:]) < 0.6 * fmean(kl[:WINDOW])
    assert all("reward" not in row and row["grad_norm"] > 0 for row in run.rows(files.TRAIN))
    before, after = (row["eval/sorting/mean"] for row in run.rows(files.EVALUATION) if "eval/sorting/mean" in row)
    assert after > before + 0.15
    assert "nothing to learn from" not in run.stdout and f"1 x KL to {teacher}" in run.stdout
    assert "The KL to the reference has fallen" in (run.folder / "report.html").read_text()
