"""Sources of the groups that a step trains. Each rank has one `Supply`, chosen when the run is built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

from colocated_grpo.environments.base import BatchResult
from colocated_grpo.rollout.collect import Collector, Gather, Stopped
from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.rollout.lengths import LongestFirst
from colocated_grpo.rollout.prompt_queue import Job
from colocated_grpo.rollout.resample import Resampling
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.generation import RolloutConfig
from colocated_grpo.types import Group, Prompt

Order = Callable[[], list[Group]]
"""The work of one rollout phase. Collective; the engine must be awake. Returns all groups, on every rank. Raises
Stopped."""


class Supply(Protocol):
    """Source of the groups to train. Every method is collective."""

    def order(self, step: int) -> Order:
        """Draw the work of a step. Raises Stopped on every rank after a stop request."""
        ...

    def settle(self, groups: list[Group]) -> BatchResult:
        """Decide which of the collected groups are trained now. The returned metrics are rank 0's."""
        ...

    def release_engine(self) -> None:
        """Wait until no rank samples, and discard what was sampled for a step that is not ordered."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """Position of the supply, on rank 0. Work that is ordered and not settled is repeated after a resume."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Opponent(Protocol):
    """A second set of weights for the engine. Every method is collective."""

    def refresh(self, step: int) -> None:
        """Copy the policy's weights if a refresh is due at `step`."""
        ...

    def plays(self) -> AbstractContextManager[None]:
        """Load these weights into the awake engine; restore the policy's on exit."""
        ...


class PromptSupply:
    """Prompts that rank 0 draws and all ranks sample."""

    def __init__(
        self,
        source: LongestFirst | None,
        collector: Collector,
        world: World,
        stop_requested: Callable[[], bool],
        config: RolloutConfig,
        sampling: Sampling,
        opponent: Opponent | None = None,
        resampling: Resampling | None = None,
        *,
        routes: bool = False,
    ) -> None:
        """source: on rank 0 only. resampling: None trains every group. routes: request the chosen experts."""
        self._source = source
        self._collector = collector
        self._world = world
        self._stop_requested = stop_requested
        self._config = config
        self.sampling = sampling
        self._opponent = opponent
        self._resampling = resampling
        self._routes = routes
        self._before: dict[str, Any] | None = None
        """The source's state before the prompts that are not settled yet."""

    def resized(self, config: RolloutConfig, sampling: Sampling) -> PromptSupply:
        """The same supply with another amount of work a step, for benchmarks."""
        other = copy(self)
        other._config, other.sampling = config, sampling
        return other

    def order(self, step: int) -> Order:
        job = self.job(step)
        return lambda: self._collect(job)

    def job(self, step: int) -> Job:
        """Draw the prompts of a step. Collective. Raises Stopped on every rank after a stop request."""
        if self._opponent is not None:
            self._opponent.refresh(step)
        prompts = self._world.from_main(self._pull)
        if prompts is None:
            raise Stopped
        return Job(
            name=f"train/{step}",
            prompts=prompts,
            group_size=self._config.group_size,
            sampling=self.sampling,
            routes=self._routes,
        )

    def sample(self, job: Job) -> Gather:
        """Decode this rank's prompts of the job; see `Collector.sample`. Further rounds are sampled by the gather."""
        gather = self._collector.sample(job)
        return lambda: self._completed(job, gather())

    def _completed(self, job: Job, groups: list[Group]) -> list[Group]:
        """Return the groups, and those of further rounds."""
        if self._resampling is None:
            return groups
        return self._resampling.complete(job, groups, self._draw_more, self._collector.collect)

    def _draw_more(self, count: int) -> list[Prompt]:
        prompts = self._world.from_main(
            lambda: None if self._stop_requested() else self._main_source().next(count),
        )
        if prompts is None:
            raise Stopped
        return prompts

    def _collect(self, job: Job) -> list[Group]:
        own = [prompt for prompt in job.prompts if not prompt.by_opponent]
        groups = self._collector.collect(replace(job, prompts=own)) if own else []
        others = [prompt for prompt in job.prompts if prompt.by_opponent]
        if others:
            assert self._opponent is not None  # the config of games with an opponent's turns names one
            with self._opponent.plays():
                its_job = replace(job, name=f"{job.name}/opponent", prompts=others, group_size=1, routes=False)
                groups += self._collector.collect(its_job)
        return self._completed(job, groups)

    def _pull(self) -> list[Prompt] | None:
        if self._stop_requested():
            return None
        source = self._main_source()
        self._before = source.state_dict()
        return source.next(self._config.prompts_per_step)

    def settle(self, groups: list[Group]) -> BatchResult:
        self._before = None
        settled = self._world.from_main(lambda: self._main_source().record(groups))
        return settled if self._resampling is None else self._resampling.choose(groups, settled)

    def release_engine(self) -> None:
        """Do nothing: prompts are sampled only while an `Order` is called."""

    def wait_for_ranks(self) -> None:
        """Wait until every rank has called this. Collective."""
        self._world.barrier()

    def _main_source(self) -> LongestFirst:
        assert self._source is not None  # on rank 0
        return self._source

    def state_dict(self) -> dict[str, Any] | None:
        return self._before or (self._source.state_dict() if self._source is not None else None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._source is not None:
            self._source.load_state_dict(state)

    def close(self) -> None:
        """Do nothing: there is no open resource."""
