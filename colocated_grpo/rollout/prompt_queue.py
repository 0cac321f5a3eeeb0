"""Assignment of a job's prompts to engines. One `Dispatch` is chosen when the run is built."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.runtime.distributed import COLLECTIVE_TIMEOUT, World
from colocated_grpo.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Job:
    """Prompts that are completed together, such as the 32 training prompts of step 7 or all held-out prompts."""

    name: str
    """Unique within the run; part of the counter's key and of the seeds."""
    prompts: Sequence[Prompt]
    group_size: int
    sampling: Sampling
    routes: bool = False
    """Request the experts that the engine chooses."""


@dataclass(frozen=True, kw_only=True)
class PromptQueue:
    """This rank's view of a job's prompts."""

    take: Callable[[], int | None]
    """Index of the next prompt for this rank; None when none is left."""
    max_running: int = sys.maxsize
    """The rank takes a prompt only while fewer completions than this are running."""
    counts: bool = True
    """False: this rank's groups duplicate those of another rank, whose groups alone are scored and used."""
    may_stop: bool = True
    """False: this rank must stay in step with the other ranks of its tensor-parallel engine."""


@dataclass(frozen=True, kw_only=True)
class EnginePlace:
    """This rank's engine among the engines of a run. The last two fields are those of `PromptQueue`."""

    engine: int
    num_engines: int
    counts: bool
    """True on the first rank of the engine."""
    may_stop: bool

    def parts(self, total: int) -> list[int]:
        """Divide a number of groups among the engines."""
        return [len(range(engine, total, self.num_engines)) for engine in range(self.num_engines)]


def engine_place(world: World, ranks_per_engine: int) -> EnginePlace:
    size = ranks_per_engine
    alone, leads = size == 1, world.rank % size == 0
    return EnginePlace(engine=world.rank // size, num_engines=world.size // size, counts=leads, may_stop=alone)


Dispatch = Callable[[Job], PromptQueue]
"""Assigns the prompts of a job to this rank's engine."""


def dynamic_dispatch(store: dist.Store, num_engines: int) -> Dispatch:
    """Each engine takes the next prompt when it has room. The position is a counter in the store of all ranks.

    At the start an engine takes at most 1/num_engines of the prompts (rounded up), so that the first engine to start
    does not take all of them.
    """

    def dispatch(job: Job) -> PromptQueue:
        def take() -> int | None:
            index = store.add(f"tickets/{job.name}", 1) - 1
            return index if index < len(job.prompts) else None

        return PromptQueue(take=take, max_running=-(-len(job.prompts) // num_engines) * job.group_size)

    return dispatch


def static_dispatch(engine: int, num_engines: int, *, counts: bool = True) -> Dispatch:
    """Prompt i goes to engine i % num_engines, in order, so that a resumed run repeats the uninterrupted run."""

    def dispatch(job: Job) -> PromptQueue:
        mine = iter(range(engine, len(job.prompts), num_engines))
        return PromptQueue(take=lambda: next(mine, None), counts=counts)

    return dispatch


def build_dispatch(world: World, *, ranks_per_engine: int, replicated: bool, deterministic: bool) -> Dispatch:
    """Collective: creates a process group for each tensor-parallel engine.

    All ranks of one engine take the prompts that its first rank takes: vLLM needs the same requests in the same order
    on each of these ranks.
    """
    size, place = ranks_per_engine, engine_place(world, ranks_per_engine)
    if replicated:
        dispatch = static_dispatch(0, 1, counts=place.engine == 0)  # every engine completes every prompt
    elif deterministic:
        dispatch = static_dispatch(place.engine, place.num_engines)
    else:
        dispatch = dynamic_dispatch(world.store, place.num_engines)
    if size == 1:
        return dispatch
    members = [list(range(first, first + size)) for first in range(0, world.size, size)]
    groups = [dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT, backend="gloo") for ranks in members]
    group, leader = groups[place.engine], place.engine * size
    assert isinstance(group, dist.ProcessGroup)  # this rank is a member

    def of_one_engine(job: Job) -> PromptQueue:
        queue = dispatch(job)

        def take() -> int | None:
            box = [queue.take() if place.counts else None]
            dist.broadcast_object_list(box, src=leader, group=group)
            return box[0]

        return replace(queue, take=take, counts=queue.counts and place.counts, may_stop=place.may_stop)

    return of_one_engine
