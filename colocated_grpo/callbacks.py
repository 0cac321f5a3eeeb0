"""User objects whose methods follow a run, log metrics, change the learning rate and end the run."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.errors import ConfigError
from colocated_grpo.runtime.run_folder import CHECKPOINTS, complete_checkpoints

if TYPE_CHECKING:
    from colocated_grpo.runtime.distributed import World

EVENTS = ("on_step_begin", "on_step_end", "on_evaluate", "on_checkpoint", "on_end")
ON_STEP_BEGIN, ON_STEP_END, ON_EVALUATE, ON_CHECKPOINT, ON_END = EVENTS
ERRORS = "callback_errors"
"""Metric: number of exceptions that callbacks raised in a step."""


@dataclass(frozen=True, kw_only=True)
class CallbackRequests:
    """Requests of callbacks so far. The same on every rank."""

    stop: bool = False
    learning_rate: float | None = None
    """None: use the schedule."""


@dataclass(kw_only=True)
class RunState:
    """State of the run for a callback, and the requests that it may make."""

    step: int
    """The step, counted from 0. An evaluation at step n measures the weights before the update of step n."""
    training_steps: int
    folder: Path
    """The run folder."""
    metrics: dict[str, float]
    """Metrics of the step or of the evaluation, by the names of metrics.jsonl; empty for the other events."""
    checkpoint: Path | None
    """The newest complete checkpoint, or None."""
    outcome: str | None
    """For on_end: finished, stopped or failed. None for other events."""
    requests: CallbackRequests
    show: Callable[[str], None] = field(repr=False)
    logged: dict[str, float] = field(default_factory=dict)
    """Metrics that callbacks have added."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the row of this step or evaluation. Raises ValueError for the name of a metric of the run."""
        if taken := sorted(self.metrics.keys() & metrics.keys() - self.logged.keys()):
            raise ValueError(f"{taken[0]!r} is a metric of the run; choose another name")
        added = {str(name): float(value) for name, value in metrics.items()}
        self.logged |= added
        self.metrics |= added

    def note(self, line: str) -> None:
        """Print a line above the live display."""
        self.show(str(line))

    def stop(self) -> None:
        """End the run after this step as if it were the last: evaluated, saved and exported."""
        self.requests = replace(self.requests, stop=True)

    def set_learning_rate(self, lr: float | None) -> None:
        """Use this learning rate from the next step on, in place of the schedule; None: use the schedule again."""
        if lr is not None and not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"learning rate {lr}: must be a number above 0, or None for the schedule's")
        self.requests = replace(self.requests, learning_rate=None if lr is None else float(lr))


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Raise ConfigError for an object without a method of EVENTS, or with one that is async or takes no argument."""
    for index, callback in enumerate(callbacks):
        key = f"callbacks.{index}: {type(callback).__name__}"
        methods = [name for name in dir(callback) if name.startswith("on_")]
        if not (found := [name for name in EVENTS if name in methods]):
            near = [match for name in methods for match in get_close_matches(name, EVENTS, n=1)]
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{key}: has none of the methods {', '.join(EVENTS)}; {hint}see docs/guides/python.md")
        for name in found:
            try:
                inspect.signature(method := getattr(callback, name)).bind(None)
            except TypeError:
                raise ConfigError(f"{key}: {name} must take one argument, {name}(self, state)") from None
            if inspect.iscoroutinefunction(method):
                raise ConfigError(f"{key}: {name} must not be async")


class Callbacks:
    """Calls the user's callbacks on rank 0, and passes their requests to every rank."""

    def __init__(
        self,
        callbacks: Sequence[object],
        training_steps: int,
        folder: Path,
        world: "World",
        note: Callable[[str], None],
        learning_rate: float | None,
    ) -> None:
        """Collective. learning_rate: set by a callback in an earlier part of the run. note: prints a line."""
        self._callbacks = list(callbacks) if world.is_main else []
        # Rank 0 decides for all ranks: a program may pass callbacks on that rank only.
        self._any = world.broadcast_object(bool(callbacks))
        self._steps = training_steps
        self._folder, self._world, self._note = folder, world, note
        self._requests = CallbackRequests(learning_rate=learning_rate)
        self._step = 0
        self._errors = 0
        self._last_error = ""
        self._checkpoints = set(self._complete()) if self._callbacks else set()

    def step_begins(self, step: int) -> None:
        """Call on_step_begin, before the prompts of the step are sampled. Requests are followed at the step's end."""
        self._call(ON_STEP_BEGIN, step, {})

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Call on_evaluate and return the metrics to add to the evaluation's row."""
        return self._call(ON_EVALUATE, step, metrics)

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Call on_step_end, and on_checkpoint for each new checkpoint. Return the metrics to add to the step's row."""
        added = self._call(ON_STEP_END, step, metrics)
        self._report_checkpoints(step)
        errors, self._errors, self._step = self._errors, 0, step
        return added | ({ERRORS: float(errors)} if errors else {})

    def requests(self) -> CallbackRequests:
        """Return the requests so far. Collective if there are callbacks."""
        if self._any:
            self._requests = self._world.broadcast_object(self._requests)
        return self._requests

    def end(self, outcome: str) -> None:
        """Call on_checkpoint for new checkpoints, then on_end."""
        self._report_checkpoints(self._step)
        self._call(ON_END, self._step, {}, outcome=outcome)

    def _report_checkpoints(self, step: int) -> None:
        if self._callbacks:
            new = [path for path in self._complete() if path not in self._checkpoints]
            self._checkpoints.update(new)
            for path in new:
                self._call(ON_CHECKPOINT, step, {}, checkpoint=path)

    def _complete(self) -> list[Path]:
        return complete_checkpoints(self._folder / CHECKPOINTS)

    def _call(
        self,
        event: str,
        step: int,
        metrics: Mapping[str, float],
        *,
        checkpoint: Path | None = None,
        outcome: str | None = None,
    ) -> dict[str, float]:
        """Call one method of all callbacks that have it, in order, with one state. Return the metrics that they log."""
        state = RunState(
            step=step,
            training_steps=self._steps,
            folder=self._folder,
            metrics=dict(metrics),
            checkpoint=checkpoint or next(reversed(self._complete()), None) if self._callbacks else None,
            outcome=outcome,
            requests=self._requests,
            show=self._note,
        )
        for callback in self._callbacks:
            if hasattr(callback, event):
                self._call_one(callback, event, state)
        self._requests = state.requests
        return state.logged

    def _call_one(self, callback: object, event: str, state: RunState) -> None:
        """Call one method. An exception is noted and counted in ERRORS; the run goes on, as after a failed reward."""
        try:
            getattr(callback, event)(state)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: a rank that exits looks finished to the other ranks
            self._errors += 1
            name = getattr(callback, "callback_name", type(callback).__name__)
            line = f"callback {name}.{event}: {one_line(error)}"
            if line != self._last_error:
                self._note(f"{line}; the run goes on")
            self._last_error = line
