"""Sampling and logging of the prompts that are evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from colocated_grpo.rollout.collect import Collector
from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.rollout.prompt_queue import Job
from colocated_grpo.runtime.distributed import World
from colocated_grpo.types import Group, Prompt

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """Prompts that are evaluated together."""

    name: str
    """Unique in the run; first part of the names of its metrics."""
    every: int
    """Steps between evaluations; 0: none during a run."""
    prompts: Sequence[Prompt]
    samples: int
    sampling: Sampling
    metrics: Callable[[Sequence[Group]], Metrics]


class Evaluator:
    """Evaluates sets with the engine's current weights. Every rank has one, with the same sets."""

    def __init__(self, sets: Sequence[EvaluationSet], collector: Collector, world: World) -> None:
        self._sets = [each for each in sets if each.prompts]
        self._collector = collector
        self._world = world
        self._evaluated: dict[str, int] = {}
        """Step of each set's last evaluation."""

    def due(self, step: int, *, last: bool = False) -> list[EvaluationSet]:
        """Return the sets to evaluate before training step `step`; all that have not been, if it is the `last`."""
        chosen = [each for each in self._sets if each.every and (last or step % each.every == 0)]
        return [each for each in chosen if self._evaluated.get(each.name) != step]

    def evaluate(self, step: int, evaluated: EvaluationSet) -> tuple[Metrics, list[Group]]:
        """Sample and score one set. Collective; the engine must be awake. Returns metrics and groups on every rank.

        Raises Stopped on every rank after a stop request.
        """
        groups = self._collector.collect(
            Job(
                name=f"{evaluated.name}/{step}",
                prompts=evaluated.prompts,
                group_size=evaluated.samples,
                sampling=evaluated.sampling,
            )
        )
        self._evaluated[evaluated.name] = step
        # On rank 0, as functions of the user may be among the metrics: all ranks must use the same numbers.
        return self._world.from_main(lambda: evaluated.metrics(groups)), groups
