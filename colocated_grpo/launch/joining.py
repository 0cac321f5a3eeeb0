"""A rank's first step: it joins the other ranks, before it imports the trainer."""

from __future__ import annotations

from functools import partial

from colocated_grpo.runtime.joining import Joined, join
from colocated_grpo.tracking import RunOutput
from colocated_grpo.tracking.ending import leave_with_other_rank


def join_ranks(output: RunOutput) -> Joined:
    """Wait for the other ranks of the run. Collective. Stop signals keep their handlers."""
    with output.phase("waiting for the other ranks"):
        return join(before_exit=partial(leave_with_other_rank, output))
