"""Where the groups of a step come from. One object a rank, chosen when the run is built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

from colocated_grpo.config.schema import RolloutConfig
from colocated_grpo.environments.base import Settled
from colocated_grpo.rollout.collect import Collector, Gather, Stopped
from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.rollout.lengths import LongestFirst
from colocated_grpo.rollout.prompt_queue import Job
from colocated_grpo.runtime.distributed import World
from colocated_grpo.types import Group, Prompt


@dataclass(frozen=True, kw_only=True)
class Order:
    """What one rollout phase is for."""

    probe: list[int]
    """Tokens like those that will be sampled, for the freshness check."""
    collect: Callable[[], list[Group]]
    """Collective; the engine must be awake. All groups, on every rank. Raises Stopped."""


class Supply(Protocol):
    """Methods are collective."""

    def order(self, step: int) -> Order:
        """Raises Stopped on every rank once a stop has been asked for."""
        ...

    def settle(self, groups: list[Group]) -> Settled:
        """What becomes of the groups that the order collected. Its metrics are those of rank 0."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """Where it stands, on rank 0: what is ordered and not settled comes again."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Opponent(Protocol):
    """Other weights that the engine can sample with. Collective."""

    def refresh(self, step: int) -> None:
        """Become the policy as it is before `step`, where that is due."""
        ...

    def plays(self) -> AbstractContextManager[None]:
        """The awake engine has these weights inside the context, and the policy's again behind it."""
        ...


class PromptSupply:
    """Prompts pulled by rank 0, sampled by all."""

    def __init__(
        self,
        source: LongestFirst | None,
        collector: Collector,
        world: World,
        stop_asked: Callable[[], bool],
        config: RolloutConfig,
        sampling: Sampling,
        opponent: Opponent | None = None,
    ) -> None:
        """source: None on all ranks but 0."""
        self._source = source
        self._collector = collector
        self._world = world
        self._stop_asked = stop_asked
        self._config = config
        self.sampling = sampling
        self._opponent = opponent
        self._before: dict[str, Any] | None = None
        """Of the source, while what it gave is not settled."""

    def resized(self, config: RolloutConfig, sampling: Sampling) -> PromptSupply:
        """Another amount of work from the same source."""
        other = copy(self)
        other._config, other.sampling = config, sampling
        return other

    def order(self, step: int) -> Order:
        job = self.job(step)
        return Order(probe=job.prompts[0].token_ids, collect=lambda: self._collect(job))

    def job(self, step: int) -> Job:
        """Collective. Raises Stopped on every rank once a stop has been asked for."""
        if self._opponent is not None:
            self._opponent.refresh(step)
        prompts = self._world.from_main(self._pull)
        if prompts is None:
            raise Stopped
        return Job(name=f"train/{step}", prompts=prompts, group_size=self._config.group_size, sampling=self.sampling)

    def sample(self, job: Job) -> Gather:
        """This rank's share of the job, as `Collector.sample` has it."""
        return self._collector.sample(job)

    def _collect(self, job: Job) -> list[Group]:
        own = [prompt for prompt in job.prompts if not prompt.by_opponent]
        groups = self._collector.collect(replace(job, prompts=own)) if own else []
        others = [prompt for prompt in job.prompts if prompt.by_opponent]
        if others:
            with self._opponent.plays():
                its_job = replace(job, name=f"{job.name}/opponent", prompts=others, group_size=1)
                groups += self._collector.collect(its_job)
        return groups

    def _pull(self) -> list[Prompt] | None:
        if self._stop_asked():
            return None
        self._before = self._source.state_dict()
        return self._source.next(self._config.prompts_per_step)

    def settle(self, groups: list[Group]) -> Settled:
        self._before = None
        return self._world.from_main(lambda: self._source.record(groups))

    def state_dict(self) -> dict[str, Any] | None:
        return self._before or (self._source.state_dict() if self._source is not None else None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._source is not None:
            self._source.load_state_dict(state)

    def close(self) -> None:
        """Nothing is held open."""
