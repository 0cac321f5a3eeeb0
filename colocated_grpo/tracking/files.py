"""Writers and readers of a run folder.

Files: config.yaml, environment.json, metrics.jsonl, rollouts.jsonl, summary.json, report.html and, on request,
atropos_batch.json. games.py writes the files of ended games.

A .jsonl file has one JSON object per line and is flushed every step. A killed run loses at most the line being written,
so readers skip an incomplete last line and reject any other damage.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TextIO, TypeVar

import yaml

from colocated_grpo.errors import RunError
from colocated_grpo.types import Group, JsonObject, Rollout

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
ATROPOS_BATCH_FILE = "atropos_batch.json"

TRAIN = "train"
EVALUATION = "evaluation"

RENAMED_METRICS = {"shared": "prefix_reuse"}
"""Old metric name -> current name. Metrics of older runs are read under their current names."""

HELD_OUT_ROLLOUTS = 16
"""Held-out prompts with a stored rollout: the same prompts at every evaluation, so that evaluations can be compared."""

Row = JsonObject
RowSchema = Mapping[str, type | UnionType]
"""Required keys of a row and the types of their values. Other keys are allowed."""
NUMBER = int | float | None
STEP_ROW: RowSchema = {"step": int}
METRICS_ROW: RowSchema = {"step": int, "kind": str}
ROLLOUT_ROW: RowSchema = {
    "kind": str,
    "step": int,
    "prompt_index": int,
    "source": str,
    "prompt": str,
    "completion": str,
    "reward": NUMBER,
    "parts": dict,
    "error": str | None,
    "finish_reason": str,
    "completion_tokens": int,
}
Item = TypeVar("Item")


class RunFolderError(RunError):
    """A run folder cannot be read. The message is one line for the user."""


class RunWriter:
    """Append to metrics.jsonl and rollouts.jsonl.

    Rows of steps >= `first_step` are dropped on opening: they were written after the checkpoint that is resumed.
    """

    def __init__(self, run_dir: Path, first_step: int, rollouts_per_step: int) -> None:
        self.rollouts_per_step = rollouts_per_step
        self._run_dir = run_dir
        self._metrics = _reopen(run_dir / METRICS_FILE, first_step)
        self._rollouts = _reopen(run_dir / ROLLOUTS_FILE, first_step)

    def train(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        """Write the metrics of a training step, and rollouts evenly spaced from the worst to the best reward."""
        self._write(TRAIN, step, metrics, _spread_by_reward(groups, self.rollouts_per_step))

    def evaluation(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        """Write the metrics of an evaluation, and the first sample of HELD_OUT_ROLLOUTS fixed prompts."""
        chosen = _evenly_spaced(sorted(groups, key=lambda group: group.prompt.index), HELD_OUT_ROLLOUTS)
        samples = [(group, 0) for group in chosen] if self.rollouts_per_step else []
        self._write(EVALUATION, step, metrics, samples)

    def close(self) -> None:
        self._metrics.close()
        self._rollouts.close()

    def _write(self, kind: str, step: int, metrics: dict[str, float], samples: list[tuple[Group, int]]) -> None:
        if not (self._run_dir / METRICS_FILE).exists():
            # A write to a deleted file succeeds and is lost. Stop now instead of training for nothing.
            raise RunError(f"{self._run_dir}: the run folder or its {METRICS_FILE} was deleted during the run")
        # Rollouts first: a kill between the two writes must not leave a metrics row without its rollouts.
        lines = [json_line(_rollout_row(kind, step, group, sample)) for group, sample in samples]
        self._rollouts.write("".join(lines))
        self._rollouts.flush()
        row = {"kind": kind, "step": step} | {key: _finite(value) for key, value in metrics.items()}
        self._metrics.write(json_line(row))
        self._metrics.flush()


def write_config(run_dir: Path, config: JsonObject) -> None:
    """Write the resolved configuration, in schema order, as a config file that loads back unchanged."""
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)
    write_atomically(run_dir / CONFIG_FILE, text)


def append_environment(run_dir: Path, start: JsonObject) -> None:
    """Add one start of the run to environment.json, which lists the first start and every resume."""
    starts = read_environment(run_dir)
    write_atomically(run_dir / ENVIRONMENT_FILE, json.dumps({"starts": [*starts, start]}, indent=2) + "\n")


def write_summary(run_dir: Path, summary: JsonObject) -> None:
    """Write summary.json: the outcome, the number of steps, and the first and last held-out reward."""
    write_atomically(run_dir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def write_atropos_batch(run_dir: Path, items: list[Any]) -> None:
    """Replace atropos_batch.json by the latest batch, as received."""
    write_atomically(run_dir / ATROPOS_BATCH_FILE, json.dumps(items))


def write_atomically(path: Path, parts: str | Iterable[str]) -> None:
    """Replace a file atomically: readers see the old or the new content, even if the process is killed.

    `parts` may be a generator that reads the old file.
    """
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines([parts] if isinstance(parts, str) else parts)
    os.replace(temporary, path)


def run_folder(path: str | Path) -> Path:
    """Return `path` as a Path. Raises RunFolderError unless it is a folder with a metrics.jsonl."""
    folder = Path(path)
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such run folder")
    if not (folder / METRICS_FILE).is_file():
        raise RunFolderError(f"{folder}: not a run folder (it has no {METRICS_FILE})")
    return folder


def read_metrics(run_dir: Path) -> list[Row]:
    """Return all metric rows in the order written, under current metric names.

    Raises RunFolderError when there are none yet.
    """
    path = run_dir / METRICS_FILE
    rows = [_with_current_names(row) for row in read_rows(path, METRICS_ROW)]
    if not rows:
        raise RunFolderError(f"{run_dir}: no metrics yet; the run has not finished its first step")
    for row in rows:
        _check_numbers(path, {key: value for key, value in row.items() if key not in METRICS_ROW})
    return rows


def read_rollouts(run_dir: Path) -> list[Row]:
    """Return the stored rollouts in the order written."""
    path = run_dir / ROLLOUTS_FILE
    rows = list(read_rows(path, ROLLOUT_ROW))
    for row in rows:
        _check_numbers(path, row["parts"])
    return rows


def read_config(run_dir: Path) -> JsonObject:
    """Return the resolved configuration; empty when the folder has no config.yaml."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        return _object(path, yaml.safe_load(path.read_text(encoding="utf-8", errors="replace")))
    except yaml.YAMLError as error:
        raise RunFolderError(f"{path}: not YAML ({' '.join(str(error).split())})") from error


def read_environment(run_dir: Path) -> list[JsonObject]:
    """Return every start of the run, oldest first."""
    path = run_dir / ENVIRONMENT_FILE
    starts = _read_object(path).get("starts", [])
    if not isinstance(starts, list):
        raise RunFolderError(f"{path}: 'starts' must be a list, not {repr(starts)[:60]}")
    return [_object(path, start) for start in starts]


def read_summary(run_dir: Path) -> JsonObject:
    """Return summary.json; empty while the run is training, or when it was killed."""
    return _read_object(run_dir / SUMMARY_FILE)


def read_rows(path: Path, schema: RowSchema = STEP_ROW) -> Iterator[Row]:
    """Yield the objects of a .jsonl file, none if it does not exist.

    A last line without a newline was cut by a kill and is skipped. Raises RunFolderError, with the line number, for a
    line that is not an object of the schema: another program may have written the file.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line_number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise RunFolderError(f"{path}:{line_number}: not a JSON line ({error.msg})") from error
            where = f"{path}:{line_number}"
            yield _checked(where, _object(where, row), schema)


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf. Example: {'policy': {'lr': 1e-6}} -> ('policy.lr', 1e-6)"""
    if isinstance(tree, dict) and tree:
        branches: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        branches = enumerate(tree)
    else:
        if prefix:
            yield prefix, tree
        return
    for key, value in branches:
        yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))


def first_and_last(rows: Iterable[Row], key: str) -> tuple[Row, Row] | None:
    """Return the first and the last row with a number under `key`; None when no row has one."""
    found = [row for row in rows if row.get(key) is not None]
    return (found[0], found[-1]) if found else None


def _with_current_names(row: Row) -> Row:
    return {RENAMED_METRICS.get(key, key): value for key, value in row.items()}


def _read_object(path: Path) -> JsonObject:
    if not path.is_file():
        return {}
    try:
        return _object(path, json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except json.JSONDecodeError as error:
        raise RunFolderError(f"{path}: not JSON ({error.msg})") from error


def _object(where: Path | str, value: Any) -> JsonObject:
    if not isinstance(value, dict):
        raise RunFolderError(f"{where}: must be an object, not {repr(value)[:60]}")
    return value


def _checked(where: str, row: Row, schema: RowSchema) -> Row:
    for key, kind in schema.items():
        if key not in row:
            raise RunFolderError(f"{where}: {key!r} is missing")
        if not isinstance(row[key], kind):
            raise RunFolderError(f"{where}: {key!r} is {repr(row[key])[:60]}, not {getattr(kind, '__name__', kind)}")
    return row


def _check_numbers(path: Path, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if not isinstance(value, NUMBER):
            raise RunFolderError(f"{path}: {key!r} is {repr(value)[:60]}, not a number")


def keep_before(path: Path, first_step: int) -> None:
    """Rewrite a .jsonl file without the rows of steps >= `first_step`, streaming: it may be larger than memory."""
    write_atomically(path, (json_line(row) for row in read_rows(path) if row["step"] < first_step))


def _reopen(path: Path, first_step: int) -> TextIO:
    keep_before(path, first_step)
    return path.open("a", encoding="utf-8")


def json_line(row: Row) -> str:
    """Encode a row as one line of strict JSON. Raises ValueError for NaN and infinity."""
    return json.dumps(row, allow_nan=False) + "\n"


def _finite(value: float | None) -> float | None:
    # JSON has no NaN or infinity: strict parsers (browsers, jq, other languages) would reject the whole file.
    return None if value is None or not math.isfinite(value) else value


def _rollout_row(kind: str, step: int, group: Group, sample: int) -> Row:
    rollout = group.rollouts[sample]
    return {
        "kind": kind,
        "step": step,
        "prompt_index": group.prompt.index,
        "sample": sample,
        "source": group.prompt.source,
        "prompt": group.prompt.text,
        "completion": rollout.text,
        "reward": _finite(rollout.score.reward),
        "parts": {name: _finite(value) for name, value in rollout.score.parts.items()},
        "error": rollout.score.error,
        "finish_reason": rollout.finish_reason,
        "completion_tokens": len(rollout.token_ids) - rollout.prompt_length,
        "policy_version": rollout.policy_version,
    }


def _spread_by_reward(groups: list[Group], count: int) -> list[tuple[Group, int]]:
    """Return (group, sample index) of `count` rollouts, evenly spaced in reward order, worst and best included.

    A rollout without a reward sorts as the worst, so that failures are stored.
    """
    samples = [(group, sample) for group in groups for sample in range(len(group.rollouts))]
    return _evenly_spaced(sorted(samples, key=lambda pair: _reward_order(pair[0].rollouts[pair[1]])), count)


def _reward_order(rollout: Rollout) -> float:
    reward = _finite(rollout.score.reward)
    return -math.inf if reward is None else reward


def _evenly_spaced(items: list[Item], count: int) -> list[Item]:
    """Return at most `count` items including the first and the last; only the last when count is 1."""
    if count >= len(items):
        return items
    if count == 1:
        return items[-1:]
    return [items[index * (len(items) - 1) // (count - 1)] for index in range(count)]
