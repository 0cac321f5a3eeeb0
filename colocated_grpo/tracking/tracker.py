"""Record a run: console, run folder, W&B, TensorBoard, and the report at the end. Rank 0 only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from colocated_grpo.settings.secret_values import masked
from colocated_grpo.tracking import files
from colocated_grpo.tracking.ending import STOPPED, summary_line, write_summary
from colocated_grpo.tracking.environment import describe_start
from colocated_grpo.tracking.games import GameWriter
from colocated_grpo.tracking.output import RunOutput
from colocated_grpo.tracking.report import LiveReport, write_report
from colocated_grpo.tracking.samples import typical_completion
from colocated_grpo.tracking.scoring_errors import ScoringErrors
from colocated_grpo.tracking.sinks import Sinks
from colocated_grpo.tracking.stability import StabilityWatch
from colocated_grpo.tracking.text import number
from colocated_grpo.types import Group, JsonObject

if TYPE_CHECKING:
    from colocated_grpo.settings import Config

STDERR = "_stderr"
"""Suffix of a metric's standard error."""


class Tracker:
    """Send metrics, rollouts and games to the console, the run folder and the enabled sinks.

    Call `start` once, `evaluation` and `flush` for each step, and `close` at the end, also after a failure. `note` may
    be called at any time.

    Steps count from 0. An evaluation at `step` measures the weights before training step `step`, so the first is at 0
    and the last at training_steps. A run resumed at `first_step` repeats the evaluation due at that step.
    """

    def __init__(self, run_dir: Path, output: RunOutput) -> None:
        self._run_dir = run_dir
        self._output = output
        self._sinks = Sinks(self.note)
        self._report = LiveReport(run_dir, self.note)
        self._shows_completion = False
        self._stability = StabilityWatch()
        self._scoring_errors = ScoringErrors()
        self._writer: files.RunWriter | None = None
        self._games: GameWriter | None = None
        self._held_out: dict[str, float] = {}

    def start(self, config: Config, facts: dict[str, str], first_step: int, decode: files.Decode | None = None) -> None:
        """Print the banner, write config.yaml and environment.json, and drop rows of steps >= `first_step`.

        `facts` are banner lines from the trainer, such as parameter count, ranks and device. decode: from token ids to
        text with special tokens, for rollouts of several turns.
        """
        self._run_dir.mkdir(parents=True, exist_ok=True)
        (self._run_dir / files.SUMMARY_FILE).unlink(missing_ok=True)
        self._output.write_log(self._run_dir)
        before = self._former_config() if first_step else {}
        files.write_config(self._run_dir, config.model_dump(mode="json"))
        files.append_environment(self._run_dir, describe_start(first_step), self.note)
        tracking = config.tracking
        self._writer = files.RunWriter(self._run_dir, first_step, tracking.rollouts_per_step, self.note, decode)
        self._shows_completion = tracking.show_completion
        self._games = GameWriter(self._run_dir, first_step, self.note)
        self._sinks.open(config, self._run_dir, first_step)
        self._output.open(_banner_facts(config, facts, self._run_dir), first_step)
        if changes := _changes(before, config.model_dump(mode="json")):
            self.note(f"settings changed since the last start: {', '.join(changes)}")

    def _former_config(self) -> JsonObject:
        """Return the settings of the last start, to list what has changed; empty if their file is damaged."""
        try:
            return files.read_config(self._run_dir)
        except files.RunFolderError as error:
            self.note(f"{error}; it is written again")
            return {}

    def flush(self, step: int, row: dict[str, float], groups: list[Group]) -> None:
        """Record one training step."""
        self._started().train(step, row, groups)
        self._sinks.log(step, row)
        self._sinks.completions(step, groups)
        self._output.step(step, {**self._held_out, **row})
        if self._shows_completion and (text := typical_completion(groups)):
            self.note(f"step {step}, {text}")
        for line in self._scoring_errors.check(step, groups):
            self.note(line)
        self._report.step()
        if warning := self._stability.check(row):
            self.note(warning)

    def games(self, step: int, games: list[JsonObject]) -> None:
        """Record the games that ended in a training step."""
        if self._games is not None:
            self._games.write(step, games)

    def evaluation(self, step: int, row: dict[str, float], groups: list[Group]) -> None:
        """Record an evaluation: on held-out prompts, or on a set, whose metrics are named eval/<name>/..."""
        self._started().evaluation(step, row, groups)
        self._sinks.log(step, row)
        self._held_out = {**self._held_out, **row}
        self.note(_evaluation_line(step, row))

    def note(self, line: str) -> None:
        """Print one line above the live display."""
        self._output.note(line)

    def close(self, state: str) -> None:
        """Restore the terminal, write summary.json and report.html, and print the report's path.

        `state` is "finished" or "stopped". A second call has no effect.
        """
        began = self._writer is not None
        self.abandon()
        if not began:
            return
        summary = write_summary(self._run_dir, state)
        hint = f"; continue with --resume {self._run_dir}" if state == STOPPED else ""
        self.note(summary_line(summary) + hint)
        if (self._run_dir / files.METRICS_FILE).stat().st_size:
            self.note(f"report: {write_report(self._run_dir)}")

    def abandon(self) -> None:
        """Restore the terminal and close all files, of a run that has failed: `ending` records why."""
        self._output.close()
        self._sinks.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _started(self) -> files.RunWriter:
        assert self._writer is not None, "call Tracker.start before the first step and close after the last"
        return self._writer


class NullTracker:
    """Tracker of the other ranks: records nothing."""

    def start(
        self, config: Config, facts: dict[str, str], first_step: int, decode: files.Decode | None = None
    ) -> None: ...
    def flush(self, step: int, row: dict[str, float], groups: list[Group]) -> None: ...
    def games(self, step: int, games: list[JsonObject]) -> None: ...
    def evaluation(self, step: int, row: dict[str, float], groups: list[Group]) -> None: ...
    def note(self, line: str) -> None: ...
    def close(self, state: str) -> None: ...
    def abandon(self) -> None: ...


def make_tracker(run_dir: Path, output: RunOutput, *, is_main: bool) -> Tracker | NullTracker:
    """Return a Tracker on rank 0 (`is_main`) and a NullTracker elsewhere."""
    return Tracker(run_dir, output) if is_main else NullTracker()


def _banner_facts(config: Config, facts: dict[str, str], run_dir: Path) -> dict[str, str]:
    """Return the banner's lines: settings from the configuration, with the trainer's `facts` after the model."""
    rollout, batch = config.rollout, config.batch
    updates = batch.minibatches * batch.epochs
    shape = (
        f"{rollout.prompts_per_step} prompts x {rollout.group_size} completions, {updates} optimizer "
        f"step{'s' if updates > 1 else ''}, micro-batches of {batch.max_tokens_per_micro_batch} tokens"
    )
    return {
        "model": config.model.name,
        **facts,
        "environments": ", ".join(environment.name for environment in config.environments),
        "loss": f"{config.loss.type}, advantages scaled by {config.advantage.scale}, lr {config.policy.lr:g}",
        "batch": shape,
        "steps": str(config.training_steps),
        "run folder": str(run_dir),
    }


def _evaluation_line(step: int, row: dict[str, float]) -> str:
    """Return the metrics of one evaluation in a line, standard errors behind their metrics."""
    base, *rest = next(iter(row), "").split("/")
    prefix = "held_out/" if base == "held_out" else f"{base}/{rest[0]}/"  # of a set: eval/<name>/
    name = "held-out evaluation" if base == "held_out" else f"evaluation of {rest[0]}"
    errors = {key: f" (+-{number(row[key + STDERR])})" for key in row if key + STDERR in row}
    shown = [key for key in row if not key.endswith(STDERR)]
    shown = [key for key in shown if not key.startswith("held_out/env/") or key.endswith("/reward")]
    parts = (f"{key.removeprefix(prefix)} {number(row[key])}{errors.get(key, '')}" for key in shown)
    return "  ".join([f"{name}, step {step}:", *parts])


def _changes(before: JsonObject, after: JsonObject) -> list[str]:
    """Describe settings that are in both configurations with different values."""
    old = dict(files.flatten(before))
    changed = [(key, value) for key, value in files.flatten(after) if old.get(key, value) != value]
    return [f"{key} {masked(old[key], key)} -> {masked(value, key)}" for key, value in changed]
