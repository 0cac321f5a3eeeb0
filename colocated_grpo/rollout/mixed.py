"""Batches that join groups of this run's own prompts with groups of environments in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from colocated_grpo.environments.base import BatchResult, EnvironmentSetupError, merge_results
from colocated_grpo.rollout.prompt_queue import Job
from colocated_grpo.rollout.supply import Order, PromptSupply, Supply
from colocated_grpo.types import Group


class MixedSupply:
    """Joins two supplies: sampled groups first, served groups after them.

    Both use the rank's one driver and inbox, so requests from outside are served while prompts are sampled, and a rank
    that has finished its prompts keeps serving requests.
    """

    def __init__(self, sampled: PromptSupply, served: Supply) -> None:
        self._sampled = sampled
        self._served = served
        self._num_sampled = 0
        """Groups of the last order that were sampled from prompts."""

    def order(self, step: int) -> Order:
        served = self._served.order(step)
        job = self._sampled.job(step)
        self._num_sampled = len(job.prompts)
        return lambda: self._collect(job, served)

    def _collect(self, job: Job, served: Order) -> list[Group]:
        gather = self._sampled.sample(job)
        # Gather only after the served batch is complete: a rank that waits for others serves no requests.
        served_groups = served()
        return _renumbered(gather(), 0) + _renumbered(served_groups, 1)

    def settle(self, groups: list[Group]) -> BatchResult:
        first = self._num_sampled
        sampled, served = self._sampled.settle(groups[:first]), self._served.settle(groups[first:])
        return merge_results([sampled, replace(served, trained_now=[first + place for place in served.trained_now])])

    def release_engine(self) -> None:
        """Do nothing: both supplies sample only while an `Order` is called."""

    def state_dict(self) -> dict[str, Any]:
        return {"sampled": self._sampled.state_dict(), "served": self._served.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != {"sampled", "served"}:
            raise EnvironmentSetupError(
                "environments: the checkpoint's run had no atropos entry beside others; an exact resume needs the same "
                "entries"
            )
        self._sampled.load_state_dict(state["sampled"])
        self._served.load_state_dict(state["served"])

    def close(self) -> None:
        self._served.close()
        self._sampled.close()


def _renumbered(groups: Sequence[Group], side: int) -> list[Group]:
    """Interleave the indices of both sides, which each count from 0: sampled groups even, served groups odd."""
    return [replace(group, prompt=replace(group.prompt, index=2 * group.prompt.index + side)) for group in groups]
