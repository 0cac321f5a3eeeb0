"""Metrics of scored groups. Pure: every rank computes the same numbers from the same groups."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from colocated_grpo.advantages import is_constant
from colocated_grpo.config.schema import RolloutConfig
from colocated_grpo.errors import RunError
from colocated_grpo.types import Group, Rollout


def rollout_metrics(groups: Sequence[Group], policy_version: int) -> dict[str, float]:
    """Rewards, lengths and staleness of one training batch. policy_version: of the weights to be trained."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.score.reward for rollout in rollouts if rollout.score.reward is not None]
    sampled = [rollout for rollout in rollouts if len(rollout.token_ids) > rollout.prompt_length]
    row = {
        "reward_std": statistics.pstdev(rewards) if rewards else 0.0,
        "prompt_tokens": _mean(rollout.prompt_length for rollout in rollouts),
        "staleness": _mean(policy_version - rollout.policy_version for rollout in sampled),
        "groups/constant": _mean(is_constant(group_rewards(group)) for group in groups),
        "reward_errors": float(sum(rollout.score.error is not None for rollout in rollouts)),
    }
    return _common(rollouts) | row


def held_out_metrics(groups: Sequence[Group]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {f"held_out/{name}": value for name, value in _common(rollouts).items()}


def _common(rollouts: Sequence[Rollout]) -> dict[str, float]:
    rewards = [rollout.score.reward for rollout in rollouts if rollout.score.reward is not None]
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.score.parts.items():
            parts.setdefault(name, []).append(value)
    return {
        **({"reward": _mean(rewards)} if rewards else {}),
        **{f"reward/{name}": _mean(values) for name, values in parts.items()},
        "completion_tokens": _mean(len(rollout.token_ids) - rollout.prompt_length for rollout in rollouts),
        "truncated": _mean(rollout.finish_reason == "length" for rollout in rollouts),
    }


def group_rewards(group: Group) -> list[float | None]:
    return [rollout.score.reward for rollout in group.rollouts]


def check_reward_errors(groups: Sequence[Group], config: RolloutConfig) -> None:
    """Raise RunError if more than config.max_reward_errors of the rewards failed.

    Without the check the run would train on the completions that are left. An opponent's completions do not count,
    because their scores are not trained.
    """
    scores = [rollout.score for group in groups if not group.prompt.by_opponent for rollout in group.rollouts]
    errors = [score.error for score in scores if score.error is not None]
    if len(errors) > config.max_reward_errors * len(scores):
        raise RunError(
            f"rewards: {len(errors)} of {len(scores)} failed, above rollout.max_reward_errors="
            f"{config.max_reward_errors:g}; the first: {errors[0]}"
        )


def lack_of_signal(groups: Sequence[Group]) -> str | None:
    """Return one line on why these groups have no gradient, or None.

    Given advantages count as a gradient, and so does a group of one rollout if any rollout has a reward.
    """
    if not groups:
        return "no group is trained yet: their turns are pending until their games end"
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if any(rollout.advantages is not None for rollout in rollouts):
        return None
    if all(rollout.score.reward is None for rollout in rollouts):
        return f"none of {len(rollouts)} completions has a reward (None or NaN), so there is nothing to learn from"
    if all(len(group.rollouts) > 1 and is_constant(group_rewards(group)) for group in groups):
        return "the rewards of each group are equal, so there is nothing to learn from"
    return None


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
