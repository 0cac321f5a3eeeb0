"""Sources of the groups that a step trains. Each rank has one `Supply`, chosen when the run is built."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from colocated_grpo.environments.base import BatchResult, EnvironmentSetupError, merge_results
from colocated_grpo.environments.streams import PromptSource
from colocated_grpo.rollout.collect import Collector, Gather, Stopped
from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.rollout.prompt_queue import Job
from colocated_grpo.rollout.resample import Resampling
from colocated_grpo.settings.generation import RolloutConfig
from colocated_grpo.types import Group, JsonObject, Prompt

PENDING = "pending"
"""Key of the state of partial rollouts: the unfinished groups of each engine."""

Order = Callable[[], list[Group]]
"""One rollout phase. Collective; the engine must be awake. Returns all groups on every rank. Raises Stopped."""


class Supply:
    """Source of the groups to train. Every method is collective."""

    def order(self, step: int) -> Order:
        """Draw the work of a step. Raises Stopped on every rank after a stop request."""
        raise NotImplementedError

    def settle(self, groups: list[Group]) -> BatchResult:
        """Decide which of the collected groups are trained now. The returned metrics are rank 0's."""
        raise NotImplementedError

    def release_engine(self) -> None:
        """Wait until all ranks have stopped sampling. Groups sampled for a step not yet ordered are discarded."""

    def state_dict(self) -> JsonObject | None:
        """Position of the supply, on rank 0. Work that is ordered but not settled is repeated after a resume."""
        return None

    def load_state_dict(self, state: JsonObject) -> None:
        """Restore the position."""

    def close(self) -> None:
        """Release open resources."""


class Opponent(Protocol):
    """A second set of weights for the engine. Every method is collective."""

    def refresh(self, step: int) -> None:
        """Copy the policy's weights if a refresh is due at `step`."""

    def plays(self) -> AbstractContextManager[None]:
        """Load the opponent's weights into the awake engine; restore the policy's weights on exit."""


@dataclass(eq=False)
class PromptSupply(Supply):
    """Prompts that rank 0 draws and all ranks sample."""

    source: PromptSource | None
    """Needed on rank 0 only."""
    collector: Collector
    config: RolloutConfig
    sampling: Sampling
    opponent: Opponent | None = None
    resampling: Resampling | None = None
    """None trains every group."""
    routes: bool = field(default=False, kw_only=True)
    """Request the chosen experts."""
    _before: JsonObject | None = field(default=None, init=False)
    """The source's state before it drew the prompts that are not settled yet."""

    def order(self, step: int) -> Order:
        job = self.job(step)
        return lambda: self._collect(job)

    def job(self, step: int) -> Job:
        """Draw the prompts of a step. Collective. Raises Stopped on every rank after a stop request."""
        if self.opponent is not None:
            self.opponent.refresh(step)
        self._before = None
        prompts = self.draw(self.config.prompts_per_step)
        size = self.config.group_size
        return Job(name=f"train/{step}", prompts=prompts, group_size=size, sampling=self.sampling, routes=self.routes)

    def sample(self, job: Job) -> Gather:
        """Decode this rank's prompts; see `Collector.sample`. The returned function samples further rounds."""
        gather = self.collector.sample(job)
        return lambda: self._completed(job, gather())

    def _completed(self, job: Job, groups: list[Group]) -> list[Group]:
        """Return the groups of this round and of further rounds."""
        if self.resampling is None:
            return groups
        return self.resampling.complete(job, groups, self.draw, self.collector.collect)

    def draw(self, count: int) -> list[Prompt]:
        """Draw the next prompts. Collective. Raises Stopped on every rank after a stop request."""

        def draw() -> list[Prompt] | None:
            if self.collector.stop_requested():
                return None
            source = self._main_source()
            self._before = self._before or source.state_dict()
            return source.next(count)

        if (prompts := self.collector.world.from_main(draw)) is None:
            raise Stopped
        return prompts

    def _collect(self, job: Job) -> list[Group]:
        own = [prompt for prompt in job.prompts if not prompt.by_opponent]
        groups = self.collector.collect(replace(job, prompts=own)) if own else []
        others = [prompt for prompt in job.prompts if prompt.by_opponent]
        if others:
            assert self.opponent is not None  # the config requires an opponent for games with an opponent's turns
            with self.opponent.plays():
                its_job = replace(job, name=f"{job.name}/opponent", prompts=others, group_size=1, routes=False)
                groups += self.collector.collect(its_job)
        return self._completed(job, groups)

    def settle(self, groups: list[Group]) -> BatchResult:
        self._before = None
        settled = self.collector.world.from_main(lambda: self._main_source().record(groups))
        return settled if self.resampling is None else self.resampling.choose(groups, settled)

    def _main_source(self) -> PromptSource:
        assert self.source is not None  # on rank 0
        return self.source

    def state_dict(self) -> JsonObject | None:
        return self._before or (self.source.state_dict() if self.source is not None else None)

    def load_state_dict(self, state: JsonObject) -> None:
        if self.source is None:
            return
        if groups := sum(map(len, state.get(PENDING, []))):
            advice = f"rollout.partial.oversample: 1 ({self.config.prompts_per_step} in each step)"
            problem = f"the checkpoint has {groups} unfinished groups; train them first with {advice}"
            raise EnvironmentSetupError(f"rollout.partial=null: {problem}")
        self.source.load_state_dict(state)


class AheadSupply(Supply):
    """Supply that samples the completions of a step with the weights of the step before.

    Sampling of step n + 1 starts when step n is settled, and ends before the weights of step n + 1 reach the engine.
    The first step after a start or a resume is sampled with its own weights.
    """

    def __init__(self, supply: PromptSupply, num_steps: int) -> None:
        """num_steps: length of the run, after which no step is sampled ahead."""
        self._supply = supply
        self._num_steps = num_steps
        self._step = 0
        self._stopped = False
        self._ahead: Future[Gather] | None = None

    def order(self, step: int) -> Order:
        """Wait until all ranks have sampled the step's completions, and gather their groups."""
        self._step = step
        if self._stopped:
            raise Stopped
        if self._ahead is None:
            return self._supply.order(step)
        gather, self._ahead = self._ahead.result(), None
        # Gather before the sync: a server that receives weights serves no requests, so no rank may still be sampling.
        groups = gather()
        return lambda: groups

    def settle(self, groups: list[Group]) -> BatchResult:
        settled = self._supply.settle(groups)
        if not settled.finished and self._step + 1 < self._num_steps:
            self._start(self._step + 1)
        return settled

    def _start(self, step: int) -> None:
        try:
            job = self._supply.job(step)
        except Stopped:  # the current step is complete and is trained first
            self._stopped = True
            return
        sampled: Future[Gather] = Future()

        def sample() -> None:
            try:
                sampled.set_result(self._supply.sample(job))
            except BaseException as error:
                sampled.set_exception(error)  # raised by `order`

        # A daemon thread: if the training thread fails, the process must not wait for completions.
        threading.Thread(target=sample, name="sampling ahead", daemon=True).start()
        self._ahead = sampled

    def release_engine(self) -> None:
        """Wait until all ranks have sampled the step ahead, whose groups are discarded."""
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None
            # A server may still be sampling for another rank, and a server that receives weights serves no requests.
            self._supply.collector.world.barrier()

    def state_dict(self) -> JsonObject | None:
        """Position before the prompts being sampled ahead. A resumed run draws them again."""
        return self._supply.state_dict()

    def load_state_dict(self, state: JsonObject) -> None:
        self._supply.load_state_dict(state)


class MixedSupply(Supply):
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

        def collect() -> list[Group]:
            gather = self._sampled.sample(job)
            # Gather only after the served batch is complete: a rank that waits for other ranks serves no requests.
            served_groups = served()
            return _renumbered(gather(), 0) + _renumbered(served_groups, 1)

        return collect

    def settle(self, groups: list[Group]) -> BatchResult:
        first = self._num_sampled
        sampled, served = self._sampled.settle(groups[:first]), self._served.settle(groups[first:])
        return merge_results([sampled, replace(served, trained_now=[first + place for place in served.trained_now])])

    def state_dict(self) -> JsonObject:
        return {"sampled": self._sampled.state_dict(), "served": self._served.state_dict()}

    def load_state_dict(self, state: JsonObject) -> None:
        if state.keys() != {"sampled", "served"}:
            problem = "the checkpoint's run had no atropos entry beside others; an exact resume needs the same entries"
            raise EnvironmentSetupError(f"environments: {problem}")
        self._sampled.load_state_dict(state["sampled"])
        self._served.load_state_dict(state["served"])

    def close(self) -> None:
        self._served.close()


def _renumbered(groups: Sequence[Group], side: int) -> list[Group]:
    """Make the indices of both sides unique; each side counts from 0. Sampled groups become even, served groups odd."""
    return [replace(group, prompt=replace(group.prompt, index=2 * group.prompt.index + side)) for group in groups]
