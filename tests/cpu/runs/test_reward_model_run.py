"""Whole runs that a reward model scores: a script of TRL, and a config with an evaluation set on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from colocated_grpo.tracking import files
from tests.support.programs import ROWS, scored_by_a_model
from tests.support.ranks import Ranks, start_module
from tests.support.reward_models import make_reward_model, scores_alone
from tests.support.training_runs import settings, tiny_model, train

TIMEOUT = 300.0


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "judging")


def test_a_script_of_trl_trains_on_the_scores_of_a_model_and_a_function(tmp_path, reward_model):
    with Ranks(scored_by_a_model, 1, tiny_model(), reward_model, tmp_path) as process:
        [result] = process.results(TIMEOUT)
    assert (result.outcome, result.steps, result.metrics["reward_errors"]) == ("finished", 2, 0)
    assert {"reward/judging", "reward/short"} <= result.metrics.keys()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    chats = [[{"role": "user", "content": row["prompt"]}] for row in ROWS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    rollouts = files.read_rollouts(result.folder)
    pairs = [(chats[texts.index(rollout["prompt"])], rollout["completion"]) for rollout in rollouts]
    assert len({text for _, text in pairs}) > 2
    for rollout, expected in zip(rollouts, scores_alone(reward_model, pairs), strict=True):
        assert rollout["parts"]["judging"] == pytest.approx(expected, abs=1e-5)
        assert rollout["reward"] == rollout["parts"]["judging"] + 0.5 * rollout["parts"]["short"]


def test_two_ranks_and_the_tool_evaluate_with_the_model_of_a_config(tmp_path, reward_model):
    rows = [{"prompt": f"sort {number}"} for number in range(100, 120)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = {"type": "dataset", "name": str(tmp_path / "rows.jsonl"), "rewards": [str(reward_model)]}
    evaluation = {"every": 2, "prompts": 2, "sets": [{"name": "test", "source": entry, "prompts": 3, "temperature": 0}]}
    run = train(
        tmp_path, settings(tiny_model(), environments=[entry], training_steps=2, evaluation=evaluation), ranks=2
    )
    assert all(row["reward"] == row["reward/judging"] for row in run.rows(files.TRAIN))
    measured = [row["eval/test/mean"] for row in run.rows(files.EVALUATION) if "eval/test/mean" in row]
    out, err, results = tmp_path / "out", tmp_path / "err", tmp_path / "results.json"
    with start_module(
        "colocated_grpo.tools.evaluate", [str(run.folder), "--output", str(results)], 1, out, err
    ) as tool:
        assert tool.exit_codes(TIMEOUT) == [0], err.read_text()
    metrics = json.loads(results.read_text())["evaluations"]["eval/test"]["metrics"]
    assert metrics["eval/test/mean"] == pytest.approx(measured[-1], abs=1e-4)
    assert metrics["eval/test/errors"] == 0
