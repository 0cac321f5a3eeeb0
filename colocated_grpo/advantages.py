"""Advantages from the rewards of sibling completions. Plain floats in, plain floats out.

A reward of None (not applicable, or failed) is excluded from every mean and standard deviation and gets advantage 0.
"""

import math
import statistics
from collections.abc import Sequence

from colocated_grpo.settings.losses import AdvantageConfig

Rewards = Sequence[float | None]


def group_advantages(groups: Sequence[Rewards], config: AdvantageConfig) -> list[list[float]]:
    """Return one advantage per reward: reward - baseline, divided by a standard deviation + eps unless scale is 'none'.

    A group without reward variance gets exact zeros. `scale: batch` takes the deviation over all groups, so one call
    must get the whole batch; the other scales treat groups independently.
    Standard deviations are unbiased (n - 1), as in TRL. Raises ValueError on a NaN or infinite reward.
    """
    for index, rewards in enumerate(groups):
        for reward in _scored(rewards):
            if not math.isfinite(reward):
                raise ValueError(f"group {index} has reward {reward}: return a finite number, or None for no score")
    centred = [_centred(rewards, config.leave_one_out) for rewards in groups]
    if config.scale == "none":
        return centred
    if config.scale == "batch":
        stds = [unbiased_std([reward for rewards in groups for reward in _scored(rewards)])] * len(groups)
    else:
        stds = [unbiased_std(_scored(rewards)) for rewards in groups]
    return [[a / (std + config.eps) for a in advantages] for advantages, std in zip(centred, stds, strict=True)]


def is_constant(rewards: Rewards) -> bool:
    """Return True if all rewards other than None are equal, so that every advantage of the group is 0.

    Such a group has no policy gradient, but a KL penalty has one: with kl.coef > 0, the group must not be dropped.
    """
    return len(set(_scored(rewards))) < 2


def _centred(rewards: Rewards, leave_one_out: bool) -> list[float]:
    """Return rewards minus baselines. Leave-one-out: reward - mean of other rewards = (reward - mean) * n / (n - 1)."""
    if is_constant(rewards):
        return [0.0] * len(rewards)  # division by eps would amplify a rounding error of the mean
    scored = _scored(rewards)
    mean = math.fsum(scored) / len(scored)
    factor = len(scored) / (len(scored) - 1) if leave_one_out else 1.0
    return [0.0 if reward is None else (reward - mean) * factor for reward in rewards]


def _scored(rewards: Rewards) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def unbiased_std(values: Sequence[float]) -> float:
    """Return the unbiased (n - 1) standard deviation, as in TRL; 0 for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
