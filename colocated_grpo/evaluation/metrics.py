"""Metrics of one evaluation set. Functions of the user may be among them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from colocated_grpo.evaluation.estimators import majority, mean_and_error, pass_at_k
from colocated_grpo.settings.evaluation import MEAN
from colocated_grpo.types import Group

STDERR = "_stderr"
"""Suffix of a metric's standard error over prompts."""


def set_metrics(
    prefix: str,
    groups: Sequence[Group],
    pass_ks: Sequence[int],
    pass_reward: float,
    answer: Callable[[str], Hashable | None] | None,
) -> dict[str, float]:
    """Return the metrics of the groups under names that begin with `prefix`.

    answer: extracts what maj@k compares; None: no maj@k. A completion whose reward is None has not passed, and counts
    in `errors` if scoring it failed.
    """
    by_prompt: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        by_prompt.setdefault(name, []).append(value)

    for group in groups:
        rewards = [rollout.score.reward for rollout in group.rollouts]
        scored = [reward for reward in rewards if reward is not None]
        passed = [reward is not None and reward >= pass_reward for reward in rewards]
        if scored:
            add(MEAN, sum(scored) / len(scored))
        for k in pass_ks:
            add(f"pass@{k}", pass_at_k(len(passed), sum(passed), k))
        if answer is not None and len(passed) > 1:
            add(f"maj@{len(passed)}", majority([answer(rollout.text) for rollout in group.rollouts], passed))
        lengths = [rollout.completion_tokens for rollout in group.rollouts]
        add("length", sum(lengths) / len(lengths))
        cut = [rollout.finish_reason == "length" for rollout in group.rollouts]
        add("truncated", sum(cut) / len(cut))
    row: dict[str, float] = {}
    for name, values in by_prompt.items():
        mean, error = mean_and_error(values)
        row[f"{prefix}/{name}"] = mean
        if error is not None:
            row[f"{prefix}/{name}{STDERR}"] = error
    errors = sum(rollout.score.error is not None for group in groups for rollout in group.rollouts)
    return {**row, f"{prefix}/errors": float(errors)}
