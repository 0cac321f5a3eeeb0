"""Group advantages against hand arithmetic. test_loss_parity_with_trl.py compares them with TRL's."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_grpo.advantages import group_advantages, is_constant
from colocated_grpo.settings.losses import AdvantageConfig

finite = st.floats(-100, 100, allow_nan=False)
any_group = st.lists(st.none() | finite, min_size=1, max_size=8)
any_config = st.builds(AdvantageConfig, scale=st.sampled_from(["group", "batch", "none"]), leave_one_out=st.booleans())


def one_group(rewards: list[float | None], **settings: object) -> list[float]:
    return group_advantages([rewards], AdvantageConfig(**settings))[0]


def test_without_scaling_the_group_mean_is_subtracted():
    assert one_group([1.0, 0.0, 0.0, 3.0], scale="none") == [0.0, -1.0, -1.0, 2.0]


def test_group_scaling_divides_by_the_unbiased_deviation_plus_eps():
    std = math.sqrt((1 + 1 + 4) / 3)  # squared distances from the mean 1, over n - 1
    expected = [0.0, -1 / (std + 0.5), -1 / (std + 0.5), 2 / (std + 0.5)]
    assert one_group([1.0, 0.0, 0.0, 3.0], eps=0.5) == pytest.approx(expected)


def test_two_siblings_are_enough_for_a_deviation():
    std = math.sqrt(0.5 * 0.5 + 0.5 * 0.5)  # over n - 1 = 1
    assert one_group([3.0, 2.0]) == pytest.approx([0.5 / (std + 1e-4), -0.5 / (std + 1e-4)])


def test_batch_scaling_uses_the_deviation_over_all_groups_and_each_groups_mean():
    groups = [[0.0, 2.0], [10.0, 12.0]]
    std = math.sqrt((36 + 16 + 16 + 36) / 3)  # distances 6, 4, 4, 6 from the batch mean 6
    a = 1 / (std + 1e-4)
    assert group_advantages(groups, AdvantageConfig(scale="batch")) == [pytest.approx([-a, a])] * 2


def test_leave_one_out_subtracts_the_mean_of_the_others():
    others = [(0 + 5) / 2, (1 + 5) / 2, (1 + 0) / 2]
    expected = [1 - others[0], 0 - others[1], 5 - others[2]]
    assert one_group([1.0, 0.0, 5.0], scale="none", leave_one_out=True) == pytest.approx(expected)


def test_an_unscored_sibling_gets_zero_and_does_not_affect_the_others():
    with_none = one_group([1.0, None, 0.0, 4.0], leave_one_out=True)
    assert with_none[1] == 0.0
    assert with_none[:1] + with_none[2:] == one_group([1.0, 0.0, 4.0], leave_one_out=True)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 10, [None, None], [None, 5.0], [3.0]])
def test_a_group_without_variance_gets_exact_zeros(rewards: list[float | None], scale: str):
    varied = [0.0, 1.0]
    advantages = group_advantages([rewards, varied], AdvantageConfig(scale=scale))
    assert advantages[0] == [0.0] * len(rewards)
    assert advantages[1][1] > 0
    assert is_constant(rewards) and not is_constant(varied)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_reward_is_rejected_with_its_group(bad: float):
    with pytest.raises(ValueError, match=r"group 1 has reward (nan|-?inf)"):
        group_advantages([[0.0, 1.0], [None, bad]], AdvantageConfig())


def test_no_groups_give_no_advantages():
    assert group_advantages([], AdvantageConfig(scale="batch")) == []


@given(st.lists(any_group, max_size=4), any_config)
def test_shape_is_kept_and_each_group_sums_to_zero(groups: list[list[float | None]], config: AdvantageConfig):
    advantages = group_advantages(groups, config)
    assert [len(group) for group in advantages] == [len(group) for group in groups]
    for group in advantages:
        assert math.fsum(group) == pytest.approx(0.0, abs=1e-9 * max(1.0, *map(abs, group)))


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=8), st.integers(-1000, 1000), any_config)
def test_adding_a_constant_to_all_rewards_changes_no_advantage(rewards: list[int], shift: int, config: AdvantageConfig):
    shifted = [reward + shift for reward in rewards]
    assert group_advantages([shifted], config)[0] == pytest.approx(group_advantages([rewards], config)[0], abs=1e-7)


@given(any_group, any_group)
def test_groups_are_independent_with_group_scaling(one: list[float | None], other: list[float | None]):
    config = AdvantageConfig(scale="group")
    assert group_advantages([one, other], config) == group_advantages([one], config) + group_advantages([other], config)
