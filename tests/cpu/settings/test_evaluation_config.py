"""Evaluation sets and dynamic sampling in a config: short forms, round trip, and one line for every mistake."""

from __future__ import annotations

import pytest

from colocated_grpo.settings.schema import Config
from tests.support.config_text import config_error, load, notes

SET = "{name: aime, source: aime.jsonl, rewards: [math_verify], samples: 8, every: 5}"


def test_the_short_form_of_a_set_is_the_long_one():
    short = load(f"evaluation: {{sets: [{SET}]}}")
    long = load(
        "evaluation: {sets: [{name: aime, samples: 8, every: 5, source: "
        "{type: dataset, name: aime.jsonl, rewards: [{name: math_verify}]}}]}"
    )
    assert short.evaluation == long.evaluation
    assert Config.model_validate(short.model_dump(mode="json")) == short
    [entry] = short.evaluation.sets
    assert entry.rates == ["mean", "pass@1", "pass@2", "pass@4", "pass@8", "maj@8"]
    [task] = load("evaluation: {sets: [{name: s, source: {name: sorting}, samples: 6}]}").evaluation.sets
    assert (task.source.type, task.pass_ks, task.rates[-1]) == ("task", [1, 2, 4, 6], "pass@6")


def test_the_best_may_be_any_rate_of_the_run():
    for metric in ("eval/aime/mean", "eval/aime/pass@4", "eval/aime/maj@8", "held_out/reward"):
        assert load(f"evaluation: {{keep_best: {metric}, sets: [{SET}]}}").evaluation.keep_best == metric


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("evaluation: {sets: [{name: a, source: a.jsonl}]}", "a dataset needs rewards"),
        ("evaluation: {sets: [{name: a/b, source: {name: sorting}}]}", "evaluation.sets.0.name='a/b': must match"),
        (f"evaluation: {{sets: [{SET}, {SET}]}}", "2 sets are named 'aime'"),
        ("evaluation: {sets: [{name: a, source: {type: turns, name: town}}]}", "must be one of task, dataset, episode"),
        (
            "evaluation: {sets: [{name: a, source: {type: task, name: sorting}, rewards: [gsm8k]}]}",
            "rewards belong to a dataset",
        ),
        (
            "evaluation: {sets: [{name: a, source: {name: x.jsonl, rewards: [gsm8k]}, rewards: [gsm8k]}]}",
            "rewards are given twice",
        ),
        (
            "evaluation: {sets: [{name: a, source: {name: x.jsonl, rewards: [gsm8k], held_out: 3}}]}",
            "evaluation.sets.0.source.held_out=3: has no meaning here",
        ),
        (
            "evaluation: {sets: [{name: a, source: {name: sorting}, temperature: 0.001}]}",
            "evaluation.sets.0.temperature=0.001: must be 0 (greedy) or at least 0.01",
        ),
        ("evaluation: {sets: [{name: a, source: {name: sorting}, answer: box}]}", "must be one of final_answer"),
        (
            "evaluation: {keep_best: eval/a/pass@3, sets: [{name: a, source: {name: sorting}, samples: 2}]}",
            "evaluation.keep_best=eval/a/pass@3: must be one of held_out/reward, eval/a/mean, eval/a/pass@1, eval/a/pa",
        ),
        ("evaluation: {every: 0, keep_best: held_out/reward}", "needs `every` above 0, here or in a set"),
        ("evaluation: {patience: 3}", "evaluation.patience=3: needs evaluation.keep_best"),
        ("rollout: {resample: {max_rounds: 0}}", "rollout.resample.max_rounds=0: must be greater than 0"),
        ("rollout: {skip_solved: {reward: 0}}", "rollout.skip_solved.reward=0: must be greater than 0"),
    ],
)
def test_a_mistake_is_one_line(text, line):
    error = config_error(text)
    assert line in error
    assert "\n" not in error


@pytest.mark.parametrize("setting", ["resample", "skip_solved"])
@pytest.mark.parametrize("source", ["{type: atropos}", "{type: turns, name: town}"])
def test_prompts_of_other_processes_and_games_are_not_replaced_or_skipped(setting, source):
    error = config_error(f"model: m\nenvironments: [{source}]\nrollout: {{{setting}: {{}}}}", alone=True)
    assert error.startswith(f"rollout.{setting}: not possible with environments.0 of type ")
    assert "\n" not in error


def test_a_note_says_if_an_evaluation_set_is_trained_on():
    text = "evaluation: {sets: [{name: a, source: a.jsonl, rewards: [gsm8k]}]}"
    trained = "[{type: dataset, name: a.jsonl, rewards: [gsm8k]}]"
    assert notes(text) == []
    assert notes(text, "--environments", trained) == [
        "evaluation set 'a': its rows are also trained on, so it does not measure generalization"
    ]
