"""Which engine serves which prompt. One way of sharing is chosen when the run is built."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch.distributed as dist

from colocated_grpo.config.schema import Config
from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.runtime.distributed import World
from colocated_grpo.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Job:
    """Prompts that are completed together. Example: 32 training prompts of step 7, or all held-out prompts."""

    name: str
    """Unique within the run; names the shared counter and the seeds."""
    prompts: Sequence[Prompt]
    group_size: int
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Share:
    """This rank's part of a job."""

    take: Callable[[], int | None]
    """Index of the next prompt to serve; None when there is none left."""
    most_running: int = sys.maxsize
    """Completions this rank may have under way at once."""
    counts: bool = True
    """Whether this rank's groups are used: of ranks that generate the same ones, only one scores them."""
    may_stop: bool = True
    """Whether this rank may leave the job by itself; ranks of one tensor-parallel engine must stay in step."""


class Sharing(Protocol):
    def open(self, job: Job) -> Share: ...


class SharedCounter:
    """The next prompt to whichever engine asks first; at the start no engine takes more than an even share."""

    def __init__(self, store: dist.Store, num_engines: int) -> None:
        self._store = store
        self._num_engines = num_engines

    def open(self, job: Job) -> Share:
        key = f"tickets/{job.name}"

        def take() -> int | None:
            index = self._store.add(key, 1) - 1
            return index if index < len(job.prompts) else None

        return Share(take=take, most_running=-(-len(job.prompts) // self._num_engines) * job.group_size)


class FixedShares:
    """Prompt i to engine i mod engines, all submitted in order: a resumed run repeats the uninterrupted one."""

    def __init__(self, engine: int, num_engines: int) -> None:
        self._engine = engine
        self._num_engines = num_engines

    def open(self, job: Job) -> Share:
        mine = iter(range(self._engine, len(job.prompts), self._num_engines))
        return Share(take=lambda: next(mine, None))


class Replicated:
    """Every engine generates every prompt; rank 0's result counts."""

    def __init__(self, *, counts: bool) -> None:
        self._counts = counts

    def open(self, job: Job) -> Share:
        everything = iter(range(len(job.prompts)))
        return Share(take=lambda: next(everything, None), counts=self._counts)


class TensorParallel:
    """Ranks of one engine take what their first rank takes: vLLM needs the same requests in the same order on each."""

    def __init__(self, inner: Sharing, group: dist.ProcessGroup, leader: int, rank: int) -> None:
        self._inner = inner
        self._group = group
        self._leader = leader
        self._is_leader = rank == leader

    def open(self, job: Job) -> Share:
        share = self._inner.open(job)

        def take() -> int | None:
            box = [share.take() if self._is_leader else None]
            dist.broadcast_object_list(box, src=self._leader, group=self._group)
            return box[0]

        return replace(share, take=take, counts=share.counts and self._is_leader, may_stop=False)


def build_sharing(config: Config, world: World) -> Sharing:
    """Collective: tensor-parallel engines get a process group each."""
    size = config.engine.tensor_parallel_size
    engine, num_engines = world.rank // size, world.size // size
    if config.rollout.generation == "replicated":
        sharing: Sharing = Replicated(counts=engine == 0)
    elif config.deterministic:
        sharing = FixedShares(engine, num_engines)
    else:
        sharing = SharedCounter(world.store, num_engines)
    if size == 1:
        return sharing
    groups = [dist.new_group(list(range(first, first + size)), backend="gloo") for first in range(0, world.size, size)]
    return TensorParallel(sharing, groups[engine], engine * size, world.rank)
