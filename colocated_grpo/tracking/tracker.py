"""Record a run: console, run folder, W&B, TensorBoard, and the report at the end. Rank 0 only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from colocated_grpo.config.secret_values import masked
from colocated_grpo.tracking import files
from colocated_grpo.tracking.console import StandardOutput, make_display
from colocated_grpo.tracking.environment import describe_start
from colocated_grpo.tracking.games import GameWriter
from colocated_grpo.tracking.report import write_report
from colocated_grpo.tracking.sinks import Sinks
from colocated_grpo.tracking.stability import StabilityWatch
from colocated_grpo.tracking.text import number
from colocated_grpo.types import Group, JsonObject

if TYPE_CHECKING:
    from colocated_grpo.config import Config

HELD_OUT_REWARD = "held_out/reward"


class Tracker:
    """Send metrics, rollouts and games to the console, the run folder and the enabled sinks.

    Call `start` once, `evaluation` and `flush` for each step, and `close` at the end, also after a failure. `note` may
    be called at any time.

    Steps count from 0. An evaluation at `step` measures the weights before training step `step`, so the first is at 0
    and the last at training_steps. A run resumed at `first_step` repeats the evaluation due at that step.
    """

    def __init__(self, config: Config, run_dir: Path, console: Console) -> None:
        self._run_dir = run_dir
        self._display = make_display(config.tracking.console, console, config.training_steps)
        self._sinks = Sinks(self.note)
        self._stability = StabilityWatch()
        self._writer: files.RunWriter | None = None
        self._games: GameWriter | None = None
        self._held_out: dict[str, float] = {}

    def start(self, config: Config, facts: dict[str, str], first_step: int) -> None:
        """Print the banner, write config.yaml and environment.json, and drop rows of steps >= `first_step`.

        `facts` are banner lines from the trainer, such as parameter count, ranks and device.
        """
        self._run_dir.mkdir(parents=True, exist_ok=True)
        (self._run_dir / files.SUMMARY_FILE).unlink(missing_ok=True)
        before = self._former_config() if first_step else {}
        files.write_config(self._run_dir, config.model_dump(mode="json"))
        files.append_environment(self._run_dir, describe_start(first_step), self.note)
        self._writer = files.RunWriter(self._run_dir, first_step, config.tracking.rollouts_per_step, self.note)
        self._games = GameWriter(self._run_dir, first_step, self.note)
        self._sinks.open(config, self._run_dir, first_step)
        self._display.open(_banner_facts(config, facts, self._run_dir), first_step)
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
        self._display.step(step, {**self._held_out, **row})
        if warning := self._stability.check(row):
            self.note(warning)

    def games(self, step: int, games: list[JsonObject]) -> None:
        """Record the games that ended in a training step."""
        if self._games is not None:
            self._games.write(step, games)

    def evaluation(self, step: int, row: dict[str, float], groups: list[Group]) -> None:
        """Record an evaluation on held-out prompts."""
        self._started().evaluation(step, row, groups)
        self._sinks.log(step, row)
        self._held_out = row
        metrics = (f"{key.removeprefix('held_out/')} {number(value)}" for key, value in row.items())
        self.note("  ".join([f"held-out evaluation, step {step}:", *metrics]))

    def note(self, line: str) -> None:
        """Print one line above the live display."""
        self._display.note(line)

    def close(self, outcome: str) -> None:
        """Restore the terminal, write summary.json and report.html, and print the report's path.

        `outcome` is "finished", "stopped" or "failed". A second call has no effect.
        """
        self._display.close()
        self._sinks.close()
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        metrics = list(files.read_rows(self._run_dir / files.METRICS_FILE))
        summary = _summary(outcome, metrics)
        files.write_summary(self._run_dir, summary)
        hint = f"; continue with --resume {self._run_dir}" if outcome == "stopped" else ""
        self.note(_summary_line(summary) + hint)
        if metrics:
            self.note(f"report: {write_report(self._run_dir)}")

    def _started(self) -> files.RunWriter:
        assert self._writer is not None, "call Tracker.start before the first step and close after the last"
        return self._writer


class NullTracker:
    """Tracker of the other ranks: records nothing."""

    def start(self, config: Config, facts: dict[str, str], first_step: int) -> None: ...
    def flush(self, step: int, row: dict[str, float], groups: list[Group]) -> None: ...
    def games(self, step: int, games: list[JsonObject]) -> None: ...
    def evaluation(self, step: int, row: dict[str, float], groups: list[Group]) -> None: ...
    def note(self, line: str) -> None: ...
    def close(self, outcome: str) -> None: ...


def make_tracker(config: Config, run_dir: Path, is_main: bool) -> Tracker | NullTracker:
    """Return a Tracker on rank 0 (`is_main`) and a NullTracker elsewhere."""
    return Tracker(config, run_dir, StandardOutput()) if is_main else NullTracker()


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


def _changes(before: JsonObject, after: JsonObject) -> list[str]:
    """Describe settings that are in both configurations with different values."""
    old = dict(files.flatten(before))
    changed = [(key, value) for key, value in files.flatten(after) if old.get(key, value) != value]
    return [f"{key} {masked(old[key], key)} -> {masked(value, key)}" for key, value in changed]


def _summary(outcome: str, metrics: list[files.Row]) -> JsonObject:
    held_out = files.first_and_last(metrics, HELD_OUT_REWARD)
    steps = [row["step"] for row in metrics if row["kind"] == files.TRAIN]
    summary: JsonObject = {"outcome": outcome, "steps": max(steps, default=-1) + 1}
    if held_out is not None:
        summary["held_out_reward"] = {
            name: {"step": row["step"], "value": row[HELD_OUT_REWARD]}
            for name, row in zip(("before", "after"), held_out, strict=True)
        }
    return summary


def _summary_line(summary: JsonObject) -> str:
    line = f"{summary['outcome']} after {summary['steps']} steps"
    if "held_out_reward" in summary:
        before, after = summary["held_out_reward"]["before"], summary["held_out_reward"]["after"]
        line += f": held-out reward {number(before['value'])} -> {number(after['value'])}"
        line += f" (steps {before['step']} -> {after['step']})"
    return line
