"""The files of a run folder: their names, their readers, the writer of games, and atomic replacement of whole files.

A killed run loses at most the last line of a .jsonl file. Readers skip it, and reject any other damage.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any

import yaml

from colocated_grpo.errors import RunError
from colocated_grpo.settings.errors import masked
from colocated_grpo.tracking.text import Note
from colocated_grpo.types import JsonObject

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
ATROPOS_BATCH_FILE = "atropos_batch.json"
FINAL, BEST = ("final_model", "final_adapter"), ("best_model", "best_adapter")
"""Folders of exports."""

TRAIN = "train"
EVALUATION = "evaluation"
GAMES_FILE = "games.jsonl"
EVENTS_FILE = "game_events.jsonl"

Row = JsonObject
NUMBER = int | float | None
SET_ASIDE = ".damaged"
"""Suffix for a damaged file that a resumed run has set aside and replaced."""


def exports(run: Path, names: Sequence[str]) -> list[Path]:
    """Return those of the exports that the run has."""
    return [run / name for name in names if (run / name).is_dir()]


RowSchema = Mapping[str, type | UnionType]
"""Keys that every row has, and the types of their values. Other keys are allowed."""
STEP_ROW: RowSchema = {"step": int}
METRICS_ROW: RowSchema = {"step": int, "kind": str}
"""All other values are numbers."""
ROLLOUT_ROW: RowSchema = {
    "kind": str,
    **dict.fromkeys(("step", "prompt_index", "completion_tokens"), int),
    **dict.fromkeys(("source", "prompt", "completion", "finish_reason"), str),
    **{"reward": NUMBER, "parts": dict, "error": str | None},
}
"""The values of `parts` are numbers."""
GAME_ROW: RowSchema = {"step": int, "source": str, "game": int, "winner": object}


class RunFolderError(RunError):
    """A run folder cannot be read. The message is one line for the user."""


def read_rows(path: Path, schema: RowSchema = STEP_ROW) -> Iterator[Row]:
    """Yield the rows of a .jsonl file, if it exists, without a last line that a kill has cut. Raises RunFolderError."""
    return (_parsed(where, line, schema) for where, line in _lines(path))


def keep_rows_before(run_dir: Path, first_step: int, note: Note) -> None:
    """Rewrite the .jsonl files, as streams, without rows of steps >= `first_step` and, with a note, damaged lines."""
    schemas = {METRICS_FILE: METRICS_ROW, ROLLOUTS_FILE: ROLLOUT_ROW, EVENTS_FILE: STEP_ROW, GAMES_FILE: GAME_ROW}
    for name, schema in schemas.items():
        if (path := run_dir / name).exists():
            write_atomically(path, _kept(path, first_step, schema, note))


def _kept(path: Path, first_step: int, schema: RowSchema, note: Note) -> Iterator[str]:
    damaged: list[RunFolderError] = []
    for where, line in _lines(path):
        try:
            row = _parsed(where, line, schema)
        except RunFolderError as error:
            damaged.append(error)
            continue
        if row["step"] < first_step:
            yield json_line(row)
    if damaged:  # the file is replaced after the end of this generator
        aside = path.with_name(path.name + SET_ASIDE)
        aside.unlink(missing_ok=True)
        shutil.copyfile(path, aside)
        note(f"{damaged[0]}; left out {len(damaged)} such lines, the file as it was is {aside.name}")


def object_of(where: Path | str, value: object) -> JsonObject:
    if not isinstance(value, dict):
        raise RunFolderError(f"{where}: must be an object, not {repr(value)[:60]}")
    return value


def json_line(row: Row) -> str:
    """Encode a row as one line of strict JSON. Raises ValueError for NaN and infinity."""
    return json.dumps(row, allow_nan=False) + "\n"


def write_atomically(path: Path, parts: str | Iterable[str], mode: int = 0o666) -> None:
    """Replace a file atomically, also if killed. parts: may read the old file. mode: permissions before the umask."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.unlink(missing_ok=True)  # left by a killed run, or a link to another file
    with open(temporary, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.writelines([parts] if isinstance(parts, str) else parts)
    os.replace(temporary, path)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield place and text of each complete line of a file, if it exists."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from ((f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.endswith("\n"))


def _parsed(where: str, line: str, schema: RowSchema) -> Row:
    row = _object(where, line, "a JSON line")
    for key, kind in schema.items():
        if key not in row:
            raise RunFolderError(f"{where}: {key!r} is missing")
        if not isinstance(row[key], kind):
            raise RunFolderError(f"{where}: {key!r} is {repr(row[key])[:60]}, not {getattr(kind, '__name__', kind)}")
    others = {key: value for key, value in row.items() if key not in schema}
    numbers = others if schema is METRICS_ROW else row["parts"] if schema is ROLLOUT_ROW else {}
    for key, value in numbers.items():
        if not isinstance(value, NUMBER):
            raise RunFolderError(f"{where}: {key!r} is {repr(value)[:60]}, not a number")
    return row


def _object(where: Path | str, text: str, kind: str) -> JsonObject:
    """Parse a JSON object. Raises RunFolderError. kind: what the text must be, for the error line."""

    def reject(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return object_of(where, json.loads(text, parse_constant=reject))
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{where}: not {kind} ({getattr(error, 'msg', error)})") from error


def write_config(run_dir: Path, config: JsonObject) -> list[str]:
    """Write the config so that it loads back unchanged. Return the keys of secrets, which only this user can read."""
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)
    secrets = [key for key, value in flatten(config) if masked(value, key) != value]
    if secrets:
        with suppress(PermissionError):  # the folder of another user
            run_dir.chmod(0o700)
    write_atomically(run_dir / CONFIG_FILE, text, mode=0o600 if secrets else 0o666)
    return secrets


def append_environment(run_dir: Path, start: JsonObject, note: Note) -> None:
    """Add a start of the run to environment.json, which lists all starts. A damaged file is set aside, with a note."""
    try:
        starts = read_environment(run_dir)
    except RunFolderError as error:
        path = run_dir / ENVIRONMENT_FILE
        path.replace(path.with_name(path.name + SET_ASIDE))
        note(f"{error}; set aside as {path.name}{SET_ASIDE}")
        starts = []
    write_atomically(run_dir / ENVIRONMENT_FILE, json.dumps({"starts": [*starts, start]}, indent=2) + "\n")


def write_atropos_batch(run_dir: Path, items: list[object]) -> None:
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
    """Return all metric rows, in order. Raises RunFolderError if there are none yet, unless `may_be_empty`."""
    if not (rows := list(read_rows(run_dir / METRICS_FILE, METRICS_ROW))) and not may_be_empty:
        raise RunFolderError(f"{run_dir}: no metrics yet; the run has not finished its first step")
    return rows


def read_rollouts(run_dir: Path) -> list[Row]:
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


def flatten(tree: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf. Example: {'policy': {'lr': 1e-6}} -> ('policy.lr', 1e-6)"""
    if isinstance(tree, dict) and tree:
        branches: Iterable[tuple[object, object]] = tree.items()
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


def _read_object(path: Path) -> JsonObject:
    return _object(path, path.read_text(encoding="utf-8", errors="replace"), "JSON") if path.is_file() else {}


def read_games(run_dir: Path) -> list[Row]:
    return list(read_rows(run_dir / GAMES_FILE, GAME_ROW))


def game_title(game: Row) -> str:
    """Return a one-line title. Example: 'town, game 12, ended in step 40: mafia'"""
    return f"{game['source']}, game {game['game']}, ended in step {game['step']}: {game['winner']}"


def append_games(run_dir: Path, step: int, games: Sequence[JsonObject]) -> None:
    """Append the games that ended in `step`. The files are closed again, so a killed run keeps every ended game."""
    if not games:  # a run without games has no such files
        return
    events = [{**event, "step": step, "source": game["source"]} for game in games for event in game.get("events", ())]
    ended = [{**{key: value for key, value in game.items() if key != "events"}, "step": step} for game in games]
    for name, rows in ((EVENTS_FILE, events), (GAMES_FILE, ended)):
        with (run_dir / name).open("a", encoding="utf-8") as file:
            file.writelines(map(json_line, rows))
