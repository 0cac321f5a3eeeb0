"""Evaluation sets, their sampling, and the record of the best step."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from colocated_grpo.rollout.collect import Collector
from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.rollout.prompt_queue import Job
from colocated_grpo.runtime.distributed import World
from colocated_grpo.types import Group, JsonObject, Prompt

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """Prompts that are evaluated together."""

    name: str
    """Unique in the run; prefix of its metric names."""
    every: int
    """Steps between evaluations. 0: the set is not evaluated during a run."""
    prompts: Sequence[Prompt]
    samples: int
    sampling: Sampling
    metrics: Callable[[Sequence[Group]], Metrics]


class Evaluator:
    """Evaluates sets with the engine's current weights. Every rank has an Evaluator of the same sets."""

    def __init__(self, sets: Sequence[EvaluationSet], collector: Collector, world: World) -> None:
        self._sets = [each for each in sets if each.prompts]
        self._collector = collector
        self._world = world
        self._evaluated: dict[str, int] = {}
        """Step of each set's last evaluation."""

    def due(self, step: int, *, last: bool = False) -> list[EvaluationSet]:
        """Return the sets to evaluate before training step `step`, except those already evaluated at this step.

        last: ignore the intervals of the sets, for the end of a run. Sets with interval 0 are left out even then.
        """
        chosen = [each for each in self._sets if each.every and (last or step % each.every == 0)]
        return [each for each in chosen if self._evaluated.get(each.name) != step]

    def evaluate(self, step: int, evaluated: EvaluationSet) -> tuple[Metrics, list[Group]]:
        """Sample and score one set. Collective, engine awake. Metrics and groups are on every rank. Raises Stopped."""
        name, size = f"{evaluated.name}/{step}", evaluated.samples
        job = Job(name=name, prompts=evaluated.prompts, group_size=size, sampling=evaluated.sampling)
        groups = self._collector.collect(job)
        self._evaluated[evaluated.name] = step
        # Computed on rank 0: metrics may call user functions, and all ranks must use the same numbers.
        return self._world.from_main(lambda: evaluated.metrics(groups)), groups


BEST_FILE = "best.json"


class Best:
    """The best value of one metric so far. Its state is part of checkpoints."""

    def __init__(self, metric: str | None, patience: int | None) -> None:
        """metric: None keeps no record. patience: the run ends after this many evaluations without a better value."""
        self.metric = metric
        self._patience = patience
        self.value: float | None = None
        self.step: int | None = None
        """Completed steps of the best weights."""
        self._last_step = -1
        """Step of the last counted evaluation. An evaluation repeated after a resume does not count again."""
        self._without_better = 0

    def update(self, step: int, row: Mapping[str, float]) -> bool:
        """Record an evaluation at `step`. Return True if its value is better than all earlier values."""
        if self.metric not in row or step <= self._last_step:
            return False
        self._last_step = step
        better = self.value is None or row[self.metric] > self.value
        if better:
            self.value, self.step, self._without_better = row[self.metric], step, 0
        else:
            self._without_better += 1
        return better

    @property
    def exhausted(self) -> bool:
        """True if the last evaluations have used up the patience."""
        return self._patience is not None and self._without_better >= self._patience

    def summary(self) -> str | None:
        """Return one line for the end of a run; None if nothing was evaluated."""
        if self.value is None:
            return None
        ended = f"; no better one in the last {self._without_better} evaluations" if self.exhausted else ""
        kept = " (the model that the run started from)" if self.step == 0 else ""
        return f"best {self.metric}: {self.value:.4g} at step {self.step}{kept}{ended}"

    def is_kept(self, folder: Path) -> bool:
        """Return True if the run folder holds the export of the best step."""
        file = folder / BEST_FILE
        try:
            return json.loads(file.read_text(encoding="utf-8")) == self._record
        except (OSError, ValueError):
            return False

    def mark_kept(self, folder: Path) -> None:
        """Write best.json: the metric, its value and the step that is exported."""
        (folder / BEST_FILE).write_text(json.dumps(self._record) + "\n", encoding="utf-8")

    @property
    def _record(self) -> JsonObject:
        return {"metric": self.metric, "value": self.value, "step": self.step}

    def state_dict(self) -> JsonObject:
        return {**self._record, "last_step": self._last_step, "without_better": self._without_better}

    def load_state_dict(self, state: JsonObject) -> None:
        """Restore a record. A record of another metric is ignored: values of different metrics are not comparable."""
        if state.get("metric") != self.metric:
            return
        self.value, self.step = state["value"], state["step"]
        self._last_step, self._without_better = state["last_step"], state["without_better"]
