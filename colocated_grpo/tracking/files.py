"""Writers and readers of a run folder.

Files: config.yaml, environment.json, metrics.jsonl, rollouts.jsonl, summary.json, report.html and, on request,
atropos_batch.json. games.py writes the files of ended games, output.py writes run.log.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO, TypeVar

import yaml

from colocated_grpo.errors import RunError
from colocated_grpo.tracking.rows import (
    NUMBER,
    SET_ASIDE,
    Row,
    RowSchema,
    RunFolderError,
    json_line,
    keep_before,
    object_of,
    read_rows,
    write_atomically,
)
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

METRICS_ROW = RowSchema(
    {"step": int, "kind": str},
    numbers=lambda row: {key: value for key, value in row.items() if key not in ("step", "kind")},
)
ROLLOUT_ROW = RowSchema(
    {
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
    },
    numbers=lambda row: row["parts"],
)
Item = TypeVar("Item")
Decode = Callable[[Sequence[int]], str]
"""From token ids to text with special tokens."""


class RunWriter:
    """Append to metrics.jsonl and rollouts.jsonl.

    Rows of steps >= `first_step` are dropped on opening: they were written after the checkpoint that is resumed.
    """

    def __init__(
        self,
        run_dir: Path,
        first_step: int,
        rollouts_per_step: int,
        note: Callable[[str], None],
        decode: Decode | None = None,
    ) -> None:
        """decode: separates sampled from observed text in rollouts of several turns; None: they are stored as one."""
        self.rollouts_per_step = rollouts_per_step
        self._run_dir = run_dir
        self._decode = decode
        keep_before(run_dir / METRICS_FILE, first_step, METRICS_ROW, note)
        keep_before(run_dir / ROLLOUTS_FILE, first_step, ROLLOUT_ROW, note)
        self._metrics = _open_to_append(run_dir / METRICS_FILE)
        self._rollouts = _open_to_append(run_dir / ROLLOUTS_FILE)

    def train(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        """Write the metrics of a training step, and rollouts evenly spaced from the worst to the best reward."""
        self._write(TRAIN, step, metrics, spread_by_reward(groups, self.rollouts_per_step))

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
        lines = [json_line(_rollout_row(kind, step, group, sample, self._decode)) for group, sample in samples]
        self._rollouts.write("".join(lines))
        self._rollouts.flush()
        row = {"kind": kind, "step": step} | {key: _finite(value) for key, value in metrics.items()}
        self._metrics.write(json_line(row))
        self._metrics.flush()


def write_config(run_dir: Path, config: JsonObject) -> None:
    """Write the resolved configuration, in schema order, as a config file that loads back unchanged."""
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)
    write_atomically(run_dir / CONFIG_FILE, text)


def append_environment(run_dir: Path, start: JsonObject, note: Callable[[str], None]) -> None:
    """Add one start of the run to environment.json, which lists the first start and every resume.

    A damaged file is set aside, with a note.
    """
    try:
        starts = read_environment(run_dir)
    except RunFolderError as error:
        path = run_dir / ENVIRONMENT_FILE
        path.replace(path.with_name(path.name + SET_ASIDE))
        note(f"{error}; set aside as {path.name}{SET_ASIDE}")
        starts = []
    write_atomically(run_dir / ENVIRONMENT_FILE, json.dumps({"starts": [*starts, start]}, indent=2) + "\n")


def write_summary(run_dir: Path, summary: JsonObject) -> None:
    """Write summary.json: how the run ended, the number of steps, and the first and last held-out reward."""
    write_atomically(run_dir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def write_atropos_batch(run_dir: Path, items: list[Any]) -> None:
    """Replace atropos_batch.json by the latest batch, as received."""
    write_atomically(run_dir / ATROPOS_BATCH_FILE, json.dumps(items))


def run_folder(path: str | Path) -> Path:
    """Return `path` as a Path. Raises RunFolderError unless it is a folder with a metrics.jsonl."""
    folder = Path(path)
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such run folder")
    if not (folder / METRICS_FILE).is_file():
        raise RunFolderError(f"{folder}: not a run folder (it has no {METRICS_FILE})")
    return folder


def read_metrics(run_dir: Path, *, may_be_empty: bool = False) -> list[Row]:
    """Return all metric rows in the order written, under current metric names.

    Raises RunFolderError when there are none yet, unless `may_be_empty`.
    """
    rows = [_with_current_names(row) for row in read_rows(run_dir / METRICS_FILE, METRICS_ROW)]
    if not rows and not may_be_empty:
        raise RunFolderError(f"{run_dir}: no metrics yet; the run has not finished its first step")
    return rows


def read_rollouts(run_dir: Path) -> list[Row]:
    """Return the stored rollouts in the order written."""
    return list(read_rows(run_dir / ROLLOUTS_FILE, ROLLOUT_ROW))


def read_config(run_dir: Path) -> JsonObject:
    """Return the resolved configuration; empty when the folder has no config.yaml."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        return object_of(path, yaml.safe_load(path.read_text(encoding="utf-8", errors="replace")))
    except (yaml.YAMLError, RecursionError) as error:
        raise RunFolderError(f"{path}: not YAML ({' '.join(str(error).split())})") from error


def read_environment(run_dir: Path) -> list[JsonObject]:
    """Return every start of the run, oldest first."""
    path = run_dir / ENVIRONMENT_FILE
    starts = _read_object(path).get("starts", [])
    if not isinstance(starts, list):
        raise RunFolderError(f"{path}: 'starts' must be a list, not {repr(starts)[:60]}")
    return [object_of(path, start) for start in starts]


def read_summary(run_dir: Path) -> JsonObject:
    """Return summary.json; empty while the run is training, or when it was killed."""
    return _read_object(run_dir / SUMMARY_FILE)


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
        return object_of(path, json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except json.JSONDecodeError as error:
        raise RunFolderError(f"{path}: not JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{path}: not JSON ({error})") from error


def _open_to_append(path: Path) -> TextIO:
    return path.open("a", encoding="utf-8")


def _finite(value: float | None) -> float | None:
    # JSON has no NaN or infinity: strict parsers (browsers, jq, other languages) would reject the whole file.
    return None if value is None or not math.isfinite(value) else value


def _rollout_row(kind: str, step: int, group: Group, sample: int, decode: Decode | None) -> Row:
    rollout = group.rollouts[sample]
    row = {
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
        "completion_tokens": rollout.completion_tokens,
        "policy_version": rollout.policy_version,
    }
    turns = [] if decode is None else _turns(rollout, group.prompt.token_ids, decode)
    return row if all(turn["sampled"] for turn in turns) else row | {"turns": turns}


def _turns(rollout: Rollout, prompt: list[int], decode: Decode) -> list[JsonObject]:
    """Return the text after the prompt in parts that are either sampled or observed, with all template tokens.

    A sequence that begins with another prompt, as an agent's may, is shown from its first token.
    """
    turns = []
    for one in rollout.sequences:
        begin = one.prompt_length if one.token_ids[: one.prompt_length] == prompt else 0
        tokens = list(zip(one.loss_mask, one.token_ids, strict=True))[begin:]
        for sampled, part in groupby(tokens, key=itemgetter(0)):
            turns.append({"sampled": sampled, "text": decode([token for _, token in part])})
    return turns


def spread_by_reward(groups: list[Group], count: int) -> list[tuple[Group, int]]:
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
