"""Dynamic sampling: groups without reward variance are replaced by groups of fresh prompts (DAPO, Yu et al. 2025).

A step samples in rounds. Groups are judged after all completions of their round have ended. The step trains the first
informative groups in draw order. A group's duration and queue position have no effect, so prompts with long completions
are as likely to be trained as others.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from colocated_grpo.environments.base import BatchResult
from colocated_grpo.rollout.prompt_queue import Job
from colocated_grpo.summaries import group_rewards, is_informative
from colocated_grpo.types import Group, Prompt

Draw = Callable[[int], Sequence[Prompt]]
"""Collective: returns so many fresh prompts on every rank. Raises Stopped on every rank after a stop request."""
Collect = Callable[[Job], list[Group]]


class Resampling:
    """Replaces the groups of one step at a time. All ranks have the same groups and make the same decisions."""

    def __init__(self, max_rounds: int, wanted: int, note: Callable[[str], None]) -> None:
        """wanted: informative groups per step. note: called with one line if a step finds fewer."""
        self._max_rounds = max_rounds
        self._wanted = wanted
        self._note = note
        self._rounds = 0
        self._short = False
        """True if the last step had too few informative groups."""

    def complete(self, job: Job, groups: list[Group], draw: Draw, collect: Collect) -> list[Group]:
        """Sample further rounds until there are enough informative groups. Returns the groups of all rounds."""
        self._rounds = 0
        while (missing := self._wanted - sum(map(is_informative, groups))) > 0 and self._rounds < self._max_rounds:
            self._rounds += 1
            prompts = draw(round_size(missing, groups, self._wanted))
            groups = groups + collect(replace(job, name=f"{job.name}/round{self._rounds}", prompts=prompts))
        self._report(job, groups)
        return groups

    def _report(self, job: Job, groups: Sequence[Group]) -> None:
        found = sum(map(is_informative, groups))
        short = found < self._wanted
        if short and not self._short:  # one line for consecutive short steps
            self._note(
                f"{job.name}: {found} of {self._wanted} groups have reward variance, after {self._rounds} more rounds "
                f"and {len(groups)} prompts; the batch is filled with groups without (resample/missing counts them)"
            )
        self._short = short

    def choose(self, groups: Sequence[Group], result: BatchResult) -> BatchResult:
        """Return `result` with the groups to train, and with metrics of all sampled groups."""
        chosen = chosen_places(groups, self._wanted)
        dropped = [group for place, group in enumerate(groups) if place not in chosen]
        metrics = resample_metrics(groups, dropped, self._wanted) | {"resample/rounds": float(self._rounds)}
        trained = [place for place in result.trained_now if place in chosen]
        return replace(result, trained_now=trained, metrics={**result.metrics, **metrics})


def round_size(missing: int, groups: Sequence[Group], most: int) -> int:
    """Return the number of prompts that yield `missing` informative groups at the rate of `groups`; at most `most`."""
    rate = Fraction(sum(map(is_informative, groups)), len(groups))
    return min(most, math.ceil(missing / rate)) if rate else most


def chosen_places(groups: Sequence[Group], wanted: int) -> list[int]:
    """Return the places of the trained groups: informative groups first, then uninformative groups.

    Groups are ordered by `Prompt.index`, the order in which prompts were drawn. Uninformative groups keep the batch
    size constant. They count in the denominator of the loss as they do without resampling.
    """
    ranked = sorted((not is_informative(group), group.prompt.index, place) for place, group in enumerate(groups))
    return sorted(place for _, _, place in ranked[:wanted])


def resample_metrics(groups: Sequence[Group], dropped: Sequence[Group], wanted: int) -> dict[str, float]:
    rewards = [reward for group in groups for reward in group_rewards(group) if reward is not None]
    informative = sum(map(is_informative, groups))
    row = {
        "resample/prompts": float(len(groups)),
        "resample/informative": informative / len(groups),
        "resample/missing": float(max(0, wanted - informative)),
        "resample/tokens": float(sum(rollout.completion_tokens for group in dropped for rollout in group.rollouts)),
    }
    return row | ({"resample/reward": sum(rewards) / len(rewards)} if rewards else {})
