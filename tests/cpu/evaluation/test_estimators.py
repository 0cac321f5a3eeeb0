"""Estimators of evaluation metrics, the answers that a majority vote compares, and the record of the best step."""

from __future__ import annotations

import json
import statistics
from decimal import Decimal
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.rewards.builtin import marked_number
from colocated_grpo.evaluation.evaluator import Best
from colocated_grpo.evaluation.metrics import (
    answer_function,
    boxed,
    final_answer,
    majority,
    pass_at_k,
    set_metrics,
)
from colocated_grpo.summaries import mean_and_error
from colocated_grpo.types import Group, Prompt, Rollout, Score


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_the_subsets_of_k_samples_in_which_one_passes(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    subsets = [any(subset) for subset in combinations(passed, k)]
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(statistics.mean(subsets))


def test_the_majority_decides_whatever_the_order_and_ties_share_the_vote():
    assert majority(["7", "7", "3"], [True, True, False]) == 1
    assert majority(["3", "7", "3"], [False, True, False]) == 0
    assert majority(["3", "7"], [False, True]) == majority(["7", "3"], [True, False]) == 0.5
    assert majority([None, None, "7"], [False, False, True]) == 1
    assert majority([None, None], [False, True]) == 0
    assert majority(["7", "7", "7", "3"], [True, True, False, False]) == pytest.approx(2 / 3)  # judged differently


def test_the_standard_error_is_that_of_the_mean_over_prompts():
    mean, error = mean_and_error([0.0, 1.0, 1.0, 0.0])
    assert (mean, error) == (0.5, pytest.approx(statistics.stdev([0, 1, 1, 0]) / 2))
    assert mean_and_error([0.25]) == (0.25, None)


def group(index: int, rewards: list[float | None], texts: list[str], error: str | None = None) -> Group:
    prompt = Prompt(index=index, token_ids=[1, 2], text="", item={}, source="eval/x")
    rollouts = [
        Rollout(
            token_ids=[1, 2, *range(3 + place)],
            loss_mask=[],
            sampling_logprobs=[],
            prompt_length=2,
            text=text,
            finish_reason="length" if place == 0 else "stop",
            policy_version=0,
            temperature=1.0,
            score=Score(reward=reward, error=error if reward is None else None),
        )
        for place, (reward, text) in enumerate(zip(rewards, texts, strict=True))
    ]
    return Group(prompt=prompt, rollouts=rollouts)


def test_a_set_has_every_metric_and_a_completion_without_a_reward_has_not_passed():
    groups = [
        group(0, [1.0, 1.0, 0.5, 0.0], ["a", "a", "b", "c"]),
        group(1, [None, 0.0, 0.0, 1.5], ["a", "b", "b", "c"], error="broken"),
    ]
    row = set_metrics("eval/x", groups, [1, 2, 4], pass_reward=1.0, answer=lambda text: text)
    assert row["eval/x/mean"] == pytest.approx((2.5 / 4 + 1.5 / 3) / 2)
    assert row["eval/x/pass@1"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert row["eval/x/pass@2"] == pytest.approx((5 / 6 + 3 / 6) / 2)
    assert row["eval/x/pass@4"] == 1
    assert row["eval/x/maj@4"] == 0.5
    assert row["eval/x/maj@4_stderr"] == 0.5
    assert (row["eval/x/length"], row["eval/x/truncated"], row["eval/x/errors"]) == (4.5, 0.25, 1)
    without = set_metrics("eval/x", groups, [1], pass_reward=0.5, answer=None)
    assert without["eval/x/pass@1"] == pytest.approx((3 / 4 + 1 / 4) / 2)
    assert not [name for name in without if "maj" in name]


def test_answers_are_what_the_built_in_rewards_judge():
    assert final_answer("<think>3</think> <answer> 7 </answer>") == "7"
    assert final_answer("<think>3</think>") is None
    assert marked_number("6 apples, #### 1,250") == Decimal(1250)
    assert marked_number("none") is None
    assert boxed(r"so \boxed{\frac{1}{2}}") == boxed(r"$\boxed{ \dfrac{1}{2} }$") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1.50}") == boxed(r"\boxed{1.5}") == boxed("it is 1.5") == Decimal("1.5")
    assert boxed(r"\boxed{0}") == 0
    assert boxed(r"\boxed{1") is None


def test_a_users_function_that_raises_gives_no_answer(tmp_path, caplog):
    (tmp_path / "mine.py").write_text("number = 1\ndef first(text):\n    return text.split()[0]\n")
    answer = answer_function(f"{tmp_path}/mine.py:first", "answer")
    assert answer("7 apples") == "7"
    assert answer("") is None
    assert answer(" ") is None
    assert len(caplog.messages) == 1  # one line, not one per completion
    with pytest.raises(EnvironmentSetupError, match="is of type int, not a function"):
        answer_function(f"{tmp_path}/mine.py:number", "answer")


def test_the_best_step_is_the_first_of_the_highest_value_and_patience_counts_evaluations():
    best = Best("m", patience=2)
    seen = [best.update(step, {"m": value, "other": 9}) for step, value in ((0, 0.1), (2, 0.3), (4, 0.3))]
    assert (seen, best.step, best.value, best.exhausted) == ([True, True, False], 2, 0.3, False)
    assert not best.update(5, {"other": 1.0}) and not best.exhausted  # another set was evaluated
    resumed = Best("m", patience=2)
    resumed.load_state_dict(json.loads(json.dumps(best.state_dict())))
    assert not resumed.update(4, {"m": 0.9})  # repeated after the resume
    for record in (best, resumed):
        assert not record.update(6, {"m": 0.2}) and record.exhausted
    assert best.state_dict() == resumed.state_dict()
    other = Best("other", patience=2)
    other.load_state_dict(best.state_dict())
    assert (other.step, other.exhausted) == (None, False)


def test_the_export_of_the_best_step_is_marked_in_the_run_folder(tmp_path):
    best = Best("m", patience=None)
    best.update(2, {"m": 0.3})
    assert not best.is_kept(tmp_path)
    best.mark_kept(tmp_path)
    assert best.is_kept(tmp_path)
    best.update(4, {"m": 0.4})
    assert not best.is_kept(tmp_path)
    assert best.summary() == "best m: 0.4 at step 4"
