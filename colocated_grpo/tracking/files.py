"""The run folder: what is written into it, and how it is read back.

config.yaml, environment.json, metrics.jsonl, rollouts.jsonl, summary.json, report.html and, where it is asked for,
atropos_batch.json; games.py writes beside them.
One JSON object a line, flushed each step: a killed run loses at most its last line, so readers forgive a cut last line
and nothing else.
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
from colocated_grpo.types import Group, Rollout

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
ATROPOS_BATCH_FILE = "atropos_batch.json"

TRAIN = "train"
EVALUATION = "evaluation"

HELD_OUT_KEPT = 16
"""Held-out prompts whose rollout is kept: the same ones each time, so that before and after can be compared."""

Row = dict[str, Any]
Shape = Mapping[str, type | UnionType]
"""What a row must hold under which keys. It may hold more."""
NUMBER = int | float | None
STEPPED: Shape = {"step": int}
METRICS: Shape = {"step": int, "kind": str}
ROLLOUT: Shape = {
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
    """A run folder that cannot be read; the message is one line for people."""


class RunWriter:
    """Appends to the two .jsonl files of one run. Rows of steps >= `first_step` belong to a lost branch: dropped."""

    def __init__(self, run_dir: Path, first_step: int, rollouts_per_step: int) -> None:
        self.rollouts_per_step = rollouts_per_step
        self._run_dir = run_dir
        self._metrics = _reopen(run_dir / METRICS_FILE, first_step)
        self._rollouts = _reopen(run_dir / ROLLOUTS_FILE, first_step)

    def train(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        """A training step: its metrics, and rollouts spread evenly from the worst to the best reward."""
        self._write(TRAIN, step, metrics, _spread_by_reward(groups, self.rollouts_per_step))

    def evaluation(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        """An evaluation: its metrics, and the first sample of the same held-out prompts each time."""
        kept = _evenly(sorted(groups, key=lambda group: group.prompt.index), HELD_OUT_KEPT)
        samples = [(group, 0) for group in kept] if self.rollouts_per_step else []
        self._write(EVALUATION, step, metrics, samples)

    def close(self) -> None:
        self._metrics.close()
        self._rollouts.close()

    def _write(self, kind: str, step: int, metrics: dict[str, float], samples: list[tuple[Group, int]]) -> None:
        if not (self._run_dir / METRICS_FILE).exists():
            # What is written into a file without a name is lost, and all else of the run with it.
            raise RunError(f"{self._run_dir}: the run folder, or its {METRICS_FILE}, was removed while the run went on")
        # Rollouts first: a kill between the two writes then leaves no metrics row that lacks its rollouts.
        lines = [json_line(_rollout_row(kind, step, group, sample)) for group, sample in samples]
        self._rollouts.write("".join(lines))
        self._rollouts.flush()
        row = {"kind": kind, "step": step} | {key: _finite(value) for key, value in metrics.items()}
        self._metrics.write(json_line(row))
        self._metrics.flush()


def write_config(run_dir: Path, config: dict[str, Any]) -> None:
    """The resolved configuration, in the order of the schema; loads back as a config file."""
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)
    write_atomically(run_dir / CONFIG_FILE, text)


def append_environment(run_dir: Path, start: dict[str, Any]) -> None:
    """Add one start of the run (the first, or a resume) to environment.json, which keeps all of them."""
    starts = read_environment(run_dir)
    write_atomically(run_dir / ENVIRONMENT_FILE, json.dumps({"starts": [*starts, start]}, indent=2) + "\n")


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    write_atomically(run_dir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def write_atropos_batch(run_dir: Path, items: list[Any]) -> None:
    """The latest batch as it came, in place of the one before."""
    write_atomically(run_dir / ATROPOS_BATCH_FILE, json.dumps(items))


def write_atomically(path: Path, parts: str | Iterable[str]) -> None:
    """Readers, and a kill at any moment, see the old file or the new one. `parts` may be read from the old one."""
    beside = path.with_name(f".{path.name}.part")
    with beside.open("w", encoding="utf-8") as file:
        file.writelines([parts] if isinstance(parts, str) else parts)
    os.replace(beside, path)


def run_folder(path: str | Path) -> Path:
    """The folder of a run that has metrics. Raises RunFolderError with one line when there is none."""
    folder = Path(path)
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such run folder")
    if not (folder / METRICS_FILE).is_file():
        raise RunFolderError(f"{folder}: not a run folder, it has no {METRICS_FILE}")
    return folder


def read_metrics(run_dir: Path) -> list[Row]:
    """All metric rows in the order written. Raises RunFolderError when there are none yet."""
    path = run_dir / METRICS_FILE
    rows = list(read_rows(path, METRICS))
    if not rows:
        raise RunFolderError(f"{run_dir}: no metrics yet, the run has not finished its first step")
    for row in rows:
        _check_numbers(path, {key: value for key, value in row.items() if key not in METRICS})
    return rows


def read_rollouts(run_dir: Path) -> list[Row]:
    path = run_dir / ROLLOUTS_FILE
    rows = list(read_rows(path, ROLLOUT))
    for row in rows:
        _check_numbers(path, row["parts"])
    return rows


def read_config(run_dir: Path) -> dict[str, Any]:
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        return _object(path, yaml.safe_load(path.read_text(encoding="utf-8", errors="replace")))
    except yaml.YAMLError as error:
        raise RunFolderError(f"{path}: not YAML ({' '.join(str(error).split())})") from error


def read_environment(run_dir: Path) -> list[dict[str, Any]]:
    """Every start of the run, oldest first."""
    path = run_dir / ENVIRONMENT_FILE
    starts = _read_object(path).get("starts", [])
    if not isinstance(starts, list):
        raise RunFolderError(f"{path}: 'starts' must be a list, not {repr(starts)[:60]}")
    return [_object(path, start) for start in starts]


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Empty while the run is going, or when it was killed."""
    return _read_object(run_dir / SUMMARY_FILE)


def read_rows(path: Path, shape: Shape = STEPPED) -> Iterator[Row]:
    """Objects of a .jsonl file; a last line without its newline was cut by a kill and is left out.

    Raises RunFolderError with one line for what is no object of the shape: another program may have written it.
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
            yield _shaped(where, _object(where, row), shape)


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys, as the command line takes them. Example: {'policy': {'lr': 1e-6}} -> ('policy.lr', 1e-6)"""
    if isinstance(tree, dict) and tree:
        branches: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list) and any(isinstance(one, dict) for one in tree):
        branches = enumerate(tree)
    else:
        if prefix:
            yield prefix, tree
        return
    for key, value in branches:
        yield from flat(value, f"{prefix}.{key}" if prefix else str(key))


def first_and_last(rows: Iterable[Row], key: str) -> tuple[Row, Row] | None:
    """The first and the last row that has a number under `key`."""
    having = [row for row in rows if row.get(key) is not None]
    return (having[0], having[-1]) if having else None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return _object(path, json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except json.JSONDecodeError as error:
        raise RunFolderError(f"{path}: not JSON ({error.msg})") from error


def _object(where: Path | str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RunFolderError(f"{where}: must be an object, not {repr(value)[:60]}")
    return value


def _shaped(where: str, row: Row, shape: Shape) -> Row:
    for key, kind in shape.items():
        if key not in row:
            raise RunFolderError(f"{where}: no {key!r}")
        if not isinstance(row[key], kind):
            raise RunFolderError(f"{where}: {key!r} is {repr(row[key])[:60]}, not {getattr(kind, '__name__', kind)}")
    return row


def _check_numbers(path: Path, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if not isinstance(value, NUMBER):
            raise RunFolderError(f"{path}: {key!r} is {repr(value)[:60]}, not a number")


def keep_before(path: Path, first_step: int) -> None:
    """Rewrite a .jsonl file without the rows of steps >= `first_step`, row by row: it may be larger than the memory."""
    write_atomically(path, (json_line(row) for row in read_rows(path) if row["step"] < first_step))


def _reopen(path: Path, first_step: int) -> TextIO:
    keep_before(path, first_step)
    return path.open("a", encoding="utf-8")


def json_line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _finite(value: float | None) -> float | None:
    # JSON has no NaN or infinity: strict readers (browsers, jq, other languages) would refuse the whole file.
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
    """`count` rollouts at even distances in the order of reward, both ends included, worst first.

    A rollout without reward counts as the worst: what went wrong is what a person wants to see.
    """
    everything = [(group, sample) for group in groups for sample in range(len(group.rollouts))]
    return _evenly(sorted(everything, key=lambda one: _reward_order(one[0].rollouts[one[1]])), count)


def _reward_order(rollout: Rollout) -> float:
    reward = _finite(rollout.score.reward)
    return -math.inf if reward is None else reward


def _evenly(items: list[Item], count: int) -> list[Item]:
    """At most `count` items, first and last included; the last alone when count is 1."""
    if count >= len(items):
        return items
    if count == 1:
        return items[-1:]
    return [items[place * (len(items) - 1) // (count - 1)] for place in range(count)]
