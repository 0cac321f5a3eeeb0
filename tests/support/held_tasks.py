"""Tasks whose run waits before a given step, where a test kills or stops it: without, it may have ended by then."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.workload import RandomWork
from colocated_grpo.environments.tasks.procedural import Sorting


class HeldSorting(Sorting):
    hold_before: int | None = None
    """Step before which the run waits until it is killed or asked to stop."""
    held_rank: int | None = None
    """The only rank that waits itself; the others wait for it in a collective. None: every rank."""

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        if self.hold_before is not None:
            hold(self.hold_before, self.held_rank)


class HeldWork(RandomWork):
    def __init__(self, hold_before: int | None = None) -> None:
        if hold_before is not None:
            hold(hold_before)


def hold(held_step: int, rank: int | None = None) -> None:
    from colocated_grpo import trainer  # the launcher, which checks the task too, does not need torch

    rollout = trainer.rollout

    def held(run: trainer.Run, step: int) -> Any:
        while step == held_step and rank in (None, run.world.rank) and not run.stop.requested():
            time.sleep(0.01)
        return rollout(run, step)

    trainer.rollout = held
