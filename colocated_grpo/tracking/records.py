"""Writers of metrics and rollouts: to the run folder, W&B and TensorBoard. A sink that fails is disabled."""

import math
import os
import sys
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar, cast

from colocated_grpo.errors import RunError
from colocated_grpo.settings import errors, schema
from colocated_grpo.summaries import advantage_of
from colocated_grpo.tracking import files
from colocated_grpo.tracking.text import Note, without_middle
from colocated_grpo.types import Group, JsonObject, Rollout

HELD_OUT_ROLLOUTS = 16
"""Held-out prompts with a stored rollout: the same prompts at every evaluation, so that evaluations can be compared."""
Item = TypeVar("Item")
Decode = Callable[[Sequence[int]], str]
"""Converts token ids to text with special tokens."""


class RunWriter:
    """Append to metrics.jsonl and rollouts.jsonl."""

    def __init__(self, run_dir: Path, rollouts_per_step: int, decode: Decode | None) -> None:
        """decode: separates sampled from observed text in rollouts of several turns; None: stored as one text."""
        self.rollouts_per_step = rollouts_per_step
        self._run_dir = run_dir
        self._decode = decode
        self._metrics = (run_dir / files.METRICS_FILE).open("a", encoding="utf-8")
        self._rollouts = (run_dir / files.ROLLOUTS_FILE).open("a", encoding="utf-8")

    def train(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        """Write the metrics of a training step, and rollouts evenly spaced from the worst to the best reward."""
        self._write(files.TRAIN, step, metrics, spread_by_reward(groups, self.rollouts_per_step))

    def evaluation(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        """Write the metrics of an evaluation, and the first sample of HELD_OUT_ROLLOUTS fixed prompts."""
        chosen = _evenly_spaced(sorted(groups, key=lambda group: group.prompt.index), HELD_OUT_ROLLOUTS)
        samples = [(group, 0) for group in chosen] if self.rollouts_per_step else []
        self._write(files.EVALUATION, step, metrics, samples)

    def close(self) -> None:
        self._metrics.close()
        self._rollouts.close()

    def _write(self, kind: str, step: int, metrics: dict[str, float], samples: list[tuple[Group, int]]) -> None:
        if not (self._run_dir / files.METRICS_FILE).exists():
            # A write to a deleted file succeeds and is lost. Stop now instead of training for nothing.
            raise RunError(f"{self._run_dir}: the run folder or its {files.METRICS_FILE} was deleted during the run")
        # Rollouts first: a kill between the two writes must not leave a metrics row without its rollouts.
        lines = [files.json_line(rollout_row(kind, step, group, sample, self._decode)) for group, sample in samples]
        self._rollouts.write("".join(lines))
        self._rollouts.flush()
        row = {"kind": kind, "step": step} | {key: finite(value) for key, value in metrics.items()}
        self._metrics.write(files.json_line(row))
        self._metrics.flush()


def finite(value: float | None) -> float | None:
    # JSON has no NaN or infinity: strict parsers (browsers, jq, other languages) would reject the whole file.
    return None if value is None or not math.isfinite(value) else value


def rollout_row(kind: str, step: int, group: Group, sample: int, decode: Decode | None) -> files.Row:
    """Return the row of one rollout in rollouts.jsonl. decode: as in `RunWriter`."""
    rollout = group.rollouts[sample]
    row = {
        "kind": kind,
        "step": step,
        "prompt_index": group.prompt.index,
        "sample": sample,
        "source": group.prompt.source,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "completion": rollout.text,
        "reward": finite(rollout.score.reward),
        "advantage": advantage_of(group, sample),
        "parts": {name: finite(value) for name, value in rollout.score.parts.items()},
        "error": rollout.score.error,
        "finish_reason": rollout.finish_reason,
        "completion_tokens": rollout.completion_tokens,
        "policy_version": rollout.policy_version,
    }
    turns = [] if decode is None else _turns(rollout, group.prompt.token_ids, decode)
    return row if all(turn["sampled"] for turn in turns) else row | {"turns": turns}


def _turns(rollout: Rollout, prompt: list[int], decode: Decode) -> list[JsonObject]:
    """Return the text after the prompt as sampled and observed parts; of an agent's other sequences, all text."""
    turns = []
    for one in rollout.sequences:
        begin = one.prompt_length if one.token_ids[: one.prompt_length] == prompt else 0
        tokens = list(zip(one.loss_mask, one.token_ids, strict=True))[begin:]
        for sampled, part in groupby(tokens, key=lambda pair: pair[0]):
            turns.append({"sampled": sampled, "text": decode([token for _, token in part])})
    return turns


def spread_by_reward(groups: list[Group], count: int) -> list[tuple[Group, int]]:
    """Return (group, sample index) of `count` rollouts, evenly spaced from the worst reward, or none, to the best."""
    samples = [(group, sample) for group in groups for sample in range(len(group.rollouts))]

    def reward(sample: tuple[Group, int]) -> float:
        found = finite(sample[0].rollouts[sample[1]].score.reward)
        return -math.inf if found is None else found

    return _evenly_spaced(sorted(samples, key=reward), count)


def _evenly_spaced(items: list[Item], count: int) -> list[Item]:
    """Return at most `count` items including the first and the last; only the last when count is 1."""
    if count >= len(items):
        return items
    if count == 1:
        return items[-1:]
    return [items[index * (len(items) - 1) // (count - 1)] for index in range(count)]


WANDB_ID_FILE = "wandb_run_id"
WANDB_SECONDS = 30
"""Timeout for the W&B service at the start, and for uploads at the end."""
TITLE = "completions"
LONGEST_TEXT = 10_000
"""Characters of a prompt or a completion; the middle of a longer text is left out."""
Cell = float | int | str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sink:
    """One external tracker. `log` takes a step and its metrics."""

    log: Callable[[int, dict[str, float]], None]
    table: Callable[[int, list[str], list[list[Cell]]], None] = lambda step, columns, rows: None
    """Send a table of completions: step, columns and rows."""
    finish: Callable[[], None]


class Sinks:
    """The external trackers enabled in the configuration. By default there are none, and nothing is imported."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._sinks: dict[str, Sink] = {}
        self._tables_every = self._table_rows = 0

    def open(self, settings: JsonObject, tracking: schema.TrackingConfig, run_dir: Path, first_step: int) -> None:
        """Start the enabled sinks and send them the settings. Not collective."""
        shown = cast("JsonObject", errors.masked(settings))
        self._tables_every, self._table_rows = tracking.completions_every, tracking.completions_rows
        if tracking.wandb != "off":
            self._add("tracking.wandb", lambda: _wandb(shown, tracking, run_dir, self._note))
        if tracking.tensorboard:
            self._add("tracking.tensorboard", lambda: _tensorboard(run_dir, first_step))

    def log(self, step: int, row: dict[str, float]) -> None:
        self._each(lambda sink: sink.log(step, row))

    def completions(self, step: int, groups: list[Group]) -> None:
        """If a table of completions is due, send it to the sinks that support tables."""
        if self._sinks and self._tables_every and step % self._tables_every == 0:
            columns, rows = completions_table(step, groups, self._table_rows)
            self._each(lambda sink: sink.table(step, columns, rows))

    def close(self) -> None:
        """Finish pending uploads, at most WANDB_SECONDS, and close every sink."""
        self._each(lambda sink: sink.finish())
        self._sinks.clear()

    def _each(self, use: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            with self._disable_on_failure(name):
                use(sink)

    def _add(self, name: str, open_sink: Callable[[], Sink]) -> None:
        with self._disable_on_failure(name), _masked_command():
            self._sinks[name] = open_sink()

    @contextmanager
    def _disable_on_failure(self, name: str) -> Generator[None]:
        # Catch any exception: sinks are clients of external services, and training must not end because one fails.
        try:
            yield
        except Exception as error:
            self._sinks.pop(name, None)
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            self._note(f"{name} disabled: {reason}")


def _wandb(settings: JsonObject, tracking: schema.TrackingConfig, run_dir: Path, note: Note) -> Sink:
    import wandb

    os.environ.setdefault("WANDB_DISABLE_WEAVE", "0" if "weave" in sys.modules else "1")  # else W&B advertises it
    # prompt=False: wandb would otherwise prompt for a key while the other ranks block in a collective.
    if tracking.wandb == "online" and not wandb.login(prompt=False, verify=False):
        raise RuntimeError("no API key; run `wandb login`, set WANDB_API_KEY, or use --tracking.wandb offline")
    id_file = run_dir / WANDB_ID_FILE
    if not id_file.is_file():  # a resumed run continues the same W&B run
        id_file.write_text(uuid.uuid4().hex, encoding="utf-8")
    run = wandb.init(
        project=tracking.wandb_project,
        name=run_dir.name,
        group=tracking.wandb_group,
        id=id_file.read_text(encoding="utf-8").strip(),
        resume="allow",
        dir=str(run_dir),
        mode="online" if tracking.wandb == "online" else "offline",
        config=settings,
        settings=wandb.Settings(
            console="off",  # capturing stdout would conflict with the live display
            silent=True,
            init_timeout=WANDB_SECONDS,
            finish_timeout=WANDB_SECONDS,
        ),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    if tracking.wandb == "online":  # an offline run has no address
        note(f"tracking.wandb: {run.url}")

    def table(step: int, columns: list[str], rows: list[list[Cell]]) -> None:
        run.log({TITLE: wandb.Table(columns=[*columns], data=[*rows]), "step": step})

    # The step is sent as a metric: W&B drops rows below its highest step, and a resumed run starts below that step.
    return Sink(log=lambda step, row: run.log({**row, "step": step}), table=table, finish=run.finish)


def _tensorboard(run_dir: Path, first_step: int) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run_dir / "tensorboard", purge_step=first_step)

    def log(step: int, row: dict[str, float]) -> None:
        for name, value in row.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Sink(log=log, finish=writer.close)


@contextmanager
def _masked_command() -> Generator[None]:
    """Mask secrets in sys.argv in this block: trackers record the command."""
    command, sys.argv = sys.argv, errors.masked_arguments(sys.argv)
    try:
        yield
    finally:
        sys.argv = command


def completions_table(step: int, groups: list[Group], count: int) -> tuple[list[str], list[list[Cell]]]:
    """Return columns and rows of `count` completions of a step, evenly spaced from the worst to the best reward."""
    chosen = [(group, group.rollouts[sample]) for group, sample in spread_by_reward(groups, count)]
    parts = list(dict.fromkeys(name for _, rollout in chosen for name in rollout.score.parts))
    columns = ["step", "prompt", "completion", "reward", *(f"reward/{part}" for part in parts)]
    rows: list[list[Cell]] = [
        [
            step,
            _bounded(group.prompt.text),
            _bounded(rollout.text),
            finite(rollout.score.reward),
            *(finite(rollout.score.parts.get(part)) for part in parts),
            group.prompt.source,
            rollout.finish_reason,
        ]
        for group, rollout in chosen
    ]
    return [*columns, "environment", "finish_reason"], rows


def _bounded(text: str) -> str:
    # A lone surrogate cannot be sent.
    return without_middle(text, LONGEST_TEXT).encode("utf-8", "replace").decode("utf-8")
