"""The numbers that people read of a training batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colocated_grpo.errors import RunError
from colocated_grpo.summaries import (
    RewardCheck,
    environment_metrics,
    held_out_metrics,
    lack_of_signal,
    mixed_held_out_metrics,
    rollout_metrics,
)
from colocated_grpo.types import Group, Score
from tests.support.small_policy import group_of, rollout_of


def groups() -> list[Group]:
    varied = [
        replace(rollout_of([1, 2], [3, 4, 5], finish_reason="length"), score=Score(reward=1.0, parts={"format": 0.5})),
        replace(rollout_of([1, 2], [3]), score=Score(reward=0.0, parts={"format": 0.0}), policy_version=2),
    ]
    failed = Score(reward=None, error="ValueError: no answer")
    constant = [rollout_of([1] * 4, [2, 2], reward=1.0), replace(rollout_of([1] * 4, [2, 2]), score=failed)]
    return [group_of(0, varied), group_of(1, constant)]


def test_rewards_are_averaged_over_the_rollouts_that_have_one():
    row = rollout_metrics(groups(), policy_version=2)
    assert row["reward"] == pytest.approx(2 / 3)
    assert row["reward_std"] == pytest.approx((1 / 3) ** 0.5)
    assert (row["reward/format"], row["reward_std/format"]) == (0.25, pytest.approx(0.125**0.5))
    assert (row["reward_errors"], row["unscorable"]) == (1, 0)


def test_completions_that_repeat_themselves_count_as_truncated():
    ends = ("stop", "length", "repetition", "stop")
    row = rollout_metrics([group_of(0, [rollout_of([1], [2], finish_reason=end) for end in ends])], policy_version=0)
    assert (row["truncated"], row["truncated/repetition"]) == (0.5, 0.25)


def test_lengths_truncation_constant_groups_and_staleness_count_every_rollout():
    row = rollout_metrics(groups(), policy_version=2)
    assert row["completion_tokens"] == pytest.approx((3 + 1 + 2 + 2) / 4)
    assert (row["completion_tokens/min"], row["completion_tokens/max"]) == (1, 3)
    assert row["prompt_tokens"] == pytest.approx((2 + 2 + 4 + 4) / 4)
    assert row["truncated"] == 0.25
    assert "truncated/repetition" not in row
    assert row["groups/constant"] == 0.5
    assert row["staleness"] == pytest.approx((2 * 3 + 0 * 1 + 2 * 2 + 2 * 2) / 8)
    assert row["staleness/tokens"] == pytest.approx(7 / 8)
    assert row["staleness/max"] == 2


def test_each_environment_has_its_own_rewards_errors_and_lengths():
    first, second = groups()
    second = replace(second, prompt=replace(second.prompt, source="gym:primes"))
    row = environment_metrics([second, first])
    assert {name.rpartition("/")[2] for name in row} == {
        *("reward", "reward_std", "completion_tokens", "truncated", "constant", "reward_errors", "unscorable")
    }
    assert (row["env/sorting/reward"], row["env/gym:primes/reward"]) == (0.5, 1.0)
    assert (row["env/sorting/truncated"], row["env/gym:primes/truncated"]) == (0.5, 0)
    assert (row["env/sorting/completion_tokens"], row["env/gym:primes/completion_tokens"]) == (2, 2)
    assert (row["env/sorting/reward_errors"], row["env/gym:primes/reward_errors"]) == (0, 1)
    assert (row["env/sorting/groups/constant"], row["env/gym:primes/groups/constant"]) == (0, 1)
    held_out = mixed_held_out_metrics([first, second])
    assert held_out["held_out/env/gym:primes/reward"] == 1.0
    assert {name for name in held_out if name.startswith("held_out/env/gym")} == {
        f"held_out/env/gym:primes/{metric}" for metric in ("reward", "completion_tokens", "truncated")
    }, "a single prompt has no standard error"
    assert held_out_metrics([first, second]).items() <= held_out.items()


def test_held_out_numbers_carry_their_own_names():
    row = held_out_metrics(groups())
    assert row["held_out/reward"] == pytest.approx(2 / 3)
    assert row["held_out/reward_stderr"] == pytest.approx(0.25), "of the prompts' means, 0.5 and 1"
    assert all(name.startswith("held_out/") for name in row)


def test_a_batch_without_any_reward_has_no_mean_reward():
    unscored = [group_of(0, [rollout_of([1], [2], reward=None)] * 2)]
    assert "reward" not in rollout_metrics(unscored, policy_version=0)
    assert rollout_metrics(unscored, policy_version=0)["groups/constant"] == 1.0


def test_too_many_failed_rewards_stop_the_run_with_the_first_error():
    RewardCheck(0.25).check(groups())
    with pytest.raises(RunError, match=r"1 of 4 failed.*max_reward_errors=0.2; the first: ValueError: no answer"):
        RewardCheck(0.2).check(groups())


def test_answers_that_a_scorer_cannot_read_are_counted_and_do_not_stop_the_run():
    unread = replace(rollout_of([1], [2]), score=Score(reward=0.0, error="ValueError: not a number"))
    batch = [group_of(0, [unread] * 4)]
    RewardCheck(0.0).check(batch)
    row = rollout_metrics(batch, policy_version=0)
    assert (row["reward"], row["unscorable"], row["reward_errors"]) == (0, 4, 0)


def test_scores_of_an_opponent_do_not_count_as_failures():
    failed = replace(rollout_of([1], [2]), score=Score(reward=None, error="KeyError: 'x'"))
    fine = group_of(0, [rollout_of([1], [2])] * 4)

    def by_opponent(group: Group) -> Group:
        return replace(group, prompt=replace(group.prompt, by_opponent=True))

    RewardCheck(0.0).check([fine, by_opponent(group_of(1, [failed] * 4))])
    with pytest.raises(RunError, match="4 of 4 failed"):
        RewardCheck(0.5).check([group_of(1, [failed] * 4), by_opponent(fine)])


def test_three_steps_in_a_row_without_any_reward_stop_the_run():
    none = [group_of(0, [rollout_of([1], [2], reward=None)] * 2)]
    check = RewardCheck(0.5)
    for batch in (none, none, groups(), none, none):
        check.check(batch)
    with pytest.raises(RunError, match="no completion of the last 3 steps has a reward"):
        check.check(none)
    without = RewardCheck(0.5, expected=False)
    for _ in range(4):
        without.check(none)


def test_advantages_of_the_environment_need_no_reward():
    unrewarded = rollout_of([1], [2], reward=None)
    none, given = ([group_of(0, [each])] for each in (unrewarded, replace(unrewarded, advantages=[0.5])))
    check = RewardCheck(0.2)
    for batch in (given, given, given, none, none):
        check.check(batch)
    with pytest.raises(RunError, match="no completion of the last 3 steps has a reward"):
        check.check(none)


def test_a_rollout_that_sampled_nothing_has_no_staleness():
    silent = replace(rollout_of([1], []), policy_version=3)
    row = rollout_metrics([group_of(0, [rollout_of([1], [2]), silent])], policy_version=5)
    assert row["staleness"] == 5 - rollout_of([1], [2]).policy_version


@pytest.mark.parametrize(
    ("rewards", "line"),
    [
        (
            [[None, None], [None, None]],
            "no reward: each of 4 completions got None or NaN, so there is nothing to learn from",
        ),
        ([[1.0, 1.0], [0.0, 0.0]], "the rewards of each group are equal, so there is nothing to learn from"),
        ([[1.0, 1.0], [0.0, 1.0]], None),
        ([[1.0], [0.0]], None),
        ([[1.0, None], [0.0, 1.0]], None),
        ([], "no group is trained yet: their turns are pending until their games end"),
    ],
)
def test_a_batch_without_a_training_signal_says_why(rewards, line):
    batch = [group_of(n, [rollout_of([1], [2], reward=one) for one in group]) for n, group in enumerate(rewards)]
    assert lack_of_signal(batch) == line


def test_given_advantages_are_a_training_signal_whatever_the_rewards_are():
    judged = [replace(rollout_of([1], [2], reward=1.0), advantages=[0.5])] * 2
    assert lack_of_signal([group_of(0, judged)]) is None


def test_sequences_of_an_episode_are_counted_where_one_has_several():
    further = [rollout_of([1], [2, 2, 2]), rollout_of([1], [2])]
    split = group_of(0, [replace(rollout_of([1, 2], [3, 4]), further=further), rollout_of([1, 2], [5])])
    row = rollout_metrics([split], policy_version=0)
    assert (row["sequences"], row["completion_tokens"], row["completion_tokens/max"]) == (2.0, 3.5, 6)
    assert "sequences" not in rollout_metrics(groups(), policy_version=2)


def test_staleness_counts_every_sequence_of_an_episode():
    """An agent's later sequences may be sampled with newer weights than its first."""
    newer = replace(rollout_of([1], [2, 2, 2]), policy_version=1, newer_versions=[(2, 2)])
    split = replace(rollout_of([1, 2], [3]), policy_version=0, further=[newer])
    row = rollout_metrics([group_of(0, [split])], policy_version=2)
    assert row["staleness"] == (2 * 1 + 1 * 1 + 0 * 2) / 4
    assert row["staleness/tokens"] == 0.5
    assert row["staleness/max"] == 2
