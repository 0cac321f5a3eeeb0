"""Metrics of scored groups. Pure: every rank computes the same numbers from the same groups."""

import math
from collections.abc import Callable, Iterable, Sequence

from colocated_grpo.advantages import is_constant, unbiased_std
from colocated_grpo.errors import NothingUsable, RunError
from colocated_grpo.types import CUT_REASONS, STDERR, Group, Rollout


def rollout_metrics(groups: Sequence[Group], policy_version: int) -> dict[str, float]:
    """Rewards, lengths and staleness of one training batch. policy_version: version of the weights to be trained."""
    rollouts = _rollouts(groups)
    sequences = [one for rollout in rollouts for one in rollout.sequences]
    ages = [(policy_version - version, tokens) for one in sequences for version, tokens in _versions(one)]
    num_tokens = sum(tokens for _, tokens in ages) or 1
    lengths = [rollout.completion_tokens for rollout in rollouts]
    row = {
        **{f"reward_std/{name}": unbiased_std(values) for name, values in _parts(rollouts).items()},
        "completion_tokens/min": float(min(lengths)),
        "completion_tokens/max": float(max(lengths)),
        "prompt_tokens": _mean(rollout.prompt_length for rollout in rollouts),
        "staleness": sum(age * tokens for age, tokens in ages) / num_tokens,
        "staleness/max": float(max((age for age, tokens in ages if tokens), default=0)),
        "staleness/tokens": sum(tokens for age, tokens in ages if age) / num_tokens,
    }
    return _common(rollouts) | _signal(groups) | row


def _versions(rollout: Rollout) -> list[tuple[int, int]]:
    """Return (policy_version, number of tokens) of each part of the completion, observed tokens included."""
    parts = [(rollout.prompt_length, rollout.policy_version), *rollout.newer_versions]
    ends = [*(start for start, _ in parts[1:]), len(rollout.token_ids)]
    return [(version, end - start) for (start, version), end in zip(parts, ends, strict=True)]


def held_out_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return means over completions as held_out/<name>, with their standard errors over prompts."""
    return {f"held_out/{name}": value for name, value in _with_errors(_common, groups).items()}


def environment_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, errors and lengths of each environment that these groups come from, as env/<name>/<metric>."""
    return {
        f"env/{name}/{metric}": value
        for name, members in _by_environment(groups).items()
        for metric, value in (_averages(_rollouts(members)) | _signal(members)).items()
    }


def mixed_held_out_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return `held_out_metrics`, and averages of each environment as held_out/env/<name>/<metric>."""
    return held_out_metrics(groups) | {
        f"held_out/env/{name}/{metric}": value
        for name, members in _by_environment(groups).items()
        for metric, value in _with_errors(_averages, members).items()
    }


def _with_errors(metrics: Callable[[Sequence[Rollout]], dict[str, float]], groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of all rollouts, and the standard error of each over prompts, named with STDERR."""
    row, by_prompt = metrics(_rollouts(groups)), [metrics(group.rollouts) for group in groups]
    errors = {name: mean_and_error([each[name] for each in by_prompt if name in each])[1] for name in row}
    return row | {name + STDERR: error for name, error in errors.items() if error is not None}


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean over prompts and its standard error. With a single prompt, the error is None.

    values: one per prompt, because completions of one prompt are not independent of each other.
    """
    error = unbiased_std(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return math.fsum(values) / len(values), error


def _by_environment(groups: Sequence[Group]) -> dict[str, list[Group]]:
    members: dict[str, list[Group]] = {}
    for group in groups:
        members.setdefault(group.prompt.source, []).append(group)
    return dict(sorted(members.items()))


def _signal(groups: Sequence[Group]) -> dict[str, float]:
    """Spread of the rewards, fraction of groups without spread, and counts of failed and unscorable completions."""
    rollouts = _rollouts(groups)
    return {
        "reward_std": unbiased_std(_rewards(rollouts)),
        "groups/constant": _mean(is_constant(group_rewards(group)) for group in groups),
        "reward_errors": float(sum(rollout.score.failed for rollout in rollouts)),
        "unscorable": float(sum(rollout.score.unscorable for rollout in rollouts)),
    }


def _common(rollouts: Sequence[Rollout]) -> dict[str, float]:
    return {f"reward/{name}": _mean(values) for name, values in _parts(rollouts).items()} | _averages(rollouts)


def _averages(rollouts: Sequence[Rollout]) -> dict[str, float]:
    rewards = _rewards(rollouts)
    ends = [one.finish_reason for rollout in rollouts for one in rollout.sequences]
    return {
        **({"reward": _mean(rewards)} if rewards else {}),
        "completion_tokens": _mean(rollout.completion_tokens for rollout in rollouts),
        "truncated": _mean(end in CUT_REASONS for end in ends),
        **({"truncated/repetition": ends.count("repetition") / len(ends)} if "repetition" in ends else {}),
        **({"sequences": _mean(len(r.sequences) for r in rollouts)} if any(r.further for r in rollouts) else {}),
    }


def _rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def _rewards(rollouts: Sequence[Rollout]) -> list[float]:
    return [rollout.score.reward for rollout in rollouts if rollout.score.reward is not None]


def _parts(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Values of each named score component, from the rollouts that have it."""
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.score.parts.items():
            parts.setdefault(name, []).append(value)
    return parts


def is_informative(group: Group) -> bool:
    """Return True if the group has a policy gradient: rewards that differ, or advantages from the environment."""
    given = any(rollout.advantages is not None for rollout in group.rollouts)
    return given or not is_constant(group_rewards(group))


def group_rewards(group: Group) -> list[float | None]:
    return [rollout.score.reward for rollout in group.rollouts]


def advantage_of(group: Group, sample: int) -> float | None:
    """Return a rollout's advantage, the mean over its tokens if the environment gave them; None if not trained."""
    own = group.rollouts[sample].advantages
    return group.advantages[sample] if own is None and group.advantages else _mean(own) if own else None


STEPS_WITHOUT_REWARD = 3
"""Consecutive steps without any reward after which a run ends."""


class RewardCheck:
    """Ends a run whose rewards fail or do not apply: it would train on the remaining completions, or on none.

    Answers that a working scorer could not read have a reward and do not count as failures. An opponent's completions
    are left out, because they are not trained.
    """

    def __init__(self, max_errors: float, *, expected: bool = True) -> None:
        """max_errors: largest fraction of a step's rewards that may fail. expected: False for runs without rewards."""
        self._expected = expected
        self._max_errors = max_errors
        self._without = 0

    def check(self, groups: Sequence[Group], *, trained: bool = False) -> None:
        """Raise RunError if too many rewards of this step failed, or if the last steps had no reward at all.

        trained: there are completed steps to save, so the error is NothingUsable.
        """
        ended = NothingUsable if trained else RunError
        rollouts = [rollout for group in groups if not group.prompt.by_opponent for rollout in group.rollouts]
        errors = [rollout.score.error for rollout in rollouts if rollout.score.failed]
        if len(errors) > self._max_errors * len(rollouts):
            limit = f"rollout.max_reward_errors={self._max_errors:g}"
            raise ended(f"rewards: {len(errors)} of {len(rollouts)} failed, above {limit}; the first: {errors[0]}")
        none = self._expected and rollouts and all(r.score.reward is None and r.advantages is None for r in rollouts)
        self._without = self._without + 1 if none else 0
        if self._without == STEPS_WITHOUT_REWARD:
            problem = f"no completion of the last {STEPS_WITHOUT_REWARD} steps has a reward, so nothing is trained"
            raise ended(f"rewards: {problem}: all are None or NaN; return a number where the reward applies")


def lack_of_signal(groups: Sequence[Group]) -> str | None:
    """Return one line that says why these groups have no gradient; None if they have a gradient.

    The groups also count as having a gradient if the environment gives advantages, or if some rollout has a reward and
    some group has only one rollout.
    """
    if not groups:
        return "no group is trained yet: their turns are pending until their games end"
    rollouts = _rollouts(groups)
    if any(rollout.advantages is not None for rollout in rollouts):
        return None
    if all(rollout.score.reward is None for rollout in rollouts):
        return f"no reward: each of {len(rollouts)} completions got None or NaN, so there is nothing to learn from"
    if all(len(group.rollouts) > 1 and is_constant(group_rewards(group)) for group in groups):
        return "the rewards of each group are equal, so there is nothing to learn from"
    return None


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
