"""A run with tools, filtered rows and a mixture: what it sampled, and that it resumes bit for bit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from colocated_grpo.tracking import files
from tests.support.templates import TEMPLATE, WEATHER
from tests.support.training_runs import (
    Settings,
    TrainingRun,
    assert_resumes_exactly,
    deterministic,
    train,
)

STEPS, EVERY = 6, 3
CODE = """
def short(completions, **columns):
    return [float(len(text) < 7) for text in completions]


def graded(row):
    return row["level"] > 0
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "my_code.py").write_text(CODE)
    graded = [{"prompt": f"sort {row}", "level": row % 4} for row in range(24)]
    few = [{"prompt": f"turn {row}"} for row in range(5)]
    for name, rows in (("graded", graded), ("few", few)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(data: Path, **checkpoint: object) -> Settings:
    rewards = [{"name": f"{data}/my_code.py:short", "run_in": "thread"}]
    graded = {
        "name": str(data / "graded.jsonl"),
        "filter": f"{data}/my_code.py:graded",
        "tools": [WEATHER],
        "chat_template_kwargs": {"enable_thinking": False},
        "weight": 2,
    }
    few = {"name": str(data / "few.jsonl")}
    changes = deterministic(
        environments=[{"type": "dataset", "rewards": rewards, "held_out": 0, **entry} for entry in (graded, few)],
        training_steps=STEPS,
        rollout={"prompts_per_step": 6, "group_size": 2, "max_prompt_tokens": 48, "skip_solved": {"after": 1}},
        evaluation={"every": 0},
        checkpoint={"every": EVERY, **checkpoint},
        tracking={"rollouts_per_step": 12},
    )
    changes["model"]["chat_template"] = TEMPLATE
    return changes


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> TrainingRun:
    return train(tmp_path_factory.mktemp("whole"), config(data, keep_last=10))


def test_the_policy_reads_what_the_settings_say(whole, data):
    graded = "graded.jsonl"
    rollouts = files.read_rollouts(whole.folder)
    assert Counter(row["source"] == graded for row in rollouts) == {True: STEPS * 4 * 2, False: STEPS * 2 * 2}
    for row in rollouts:
        if row["source"] == graded:
            assert row["prompt"].startswith("<|system|>weather <|end|><|user|>sort ")
            assert row["prompt"].endswith("<|end|><|assistant|><think></think>")
        else:
            assert row["prompt"].startswith("<|user|>turn ") and row["prompt"].endswith("<|end|><|assistant|>")
    left_out = f"6 by filter {data}/my_code.py:graded (rows 0, 4, 8, ...)"
    note = f"environments '{graded}': 'train': 18 of 24 rows are kept; left out: {left_out}"
    assert note in whole.stdout


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(whole, data, tmp_path):
    """The copy is what a kill after step 3 leaves: in the middle of a pass."""
    assert_resumes_exactly(whole, tmp_path, config(data), first_step=EVERY)
