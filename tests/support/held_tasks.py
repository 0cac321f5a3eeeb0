"""Tasks whose run waits before a given step for a test that looks at it, stops or kills it.

Without the wait, the run might have ended by then.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.workload import RandomWork
from colocated_grpo.environments.tasks.procedural import Sorting


class HeldSorting(Sorting):
    hold_before: int | None = None
    """Step before which the run waits until it is killed, is asked to stop, or `until` exists."""
    until: Path | None = None
    held_rank: int | None = None
    """The only rank that waits itself; the others wait for it in a collective. None: every rank."""

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        if self.hold_before is not None:
            hold(self.hold_before, self.held_rank, self.until)


class HeldWork(RandomWork):
    def __init__(self, hold_before: int | None = None) -> None:
        if hold_before is not None:
            hold(hold_before)


def hold(held_step: int, rank: int | None = None, until: Path | None = None) -> None:
    from colocated_grpo import trainer  # the launcher, which checks the task too, does not need torch

    rollout = trainer.rollout

    def held(run: trainer.Run, step: int) -> Any:
        if step == held_step and rank in (None, run.world.rank):
            while not run.stop.requested() and not (until is not None and until.exists()):
                time.sleep(0.01)
        return rollout(run, step)

    trainer.rollout = held
