"""A disk that is full after so many bytes or files, or on which one call fails: one line, and the run can be resumed.

The run folder of a full disk is a tmpfs of its own. Mounting it needs root, or `unshare --map-root-user --mount` before
the command. Single calls fail inside the rank.
"""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

from colocated_grpo.checkpoint.storage import DamagedCheckpoint, read_whole
from colocated_grpo.runtime.run_folder import CHECKPOINTS, complete_checkpoints
from colocated_grpo.tracking import files
from colocated_grpo.types import JsonObject
from tests.chaos.kills import AUTO, exported
from tests.chaos.trial import Trial
from tests.support.faulty_runs import FAULTY_TASK
from tests.support.training_runs import ForkedRun, Settings, TrainingRun, deterministic, without_wall_clock

Outcome = dict[str, Any]
"""Results of a run that equal runs share."""

STEPS = 6
AMPLE = "size=256m,nr_inodes=100k"
SETTINGS: Settings = {
    "training_steps": STEPS,
    "checkpoint": {"every": 2, "export_every": 4, "keep_last": 2},
    "evaluation": {"every": 3, "prompts": 4},
}
CALLS = "failing_call"
KINDS = ("size", CALLS, CALLS, CALLS, "nr_inodes", CALLS, CALLS, CALLS)
"""Rounds in turn: the bytes or the files of the disk are limited, or one call fails."""
MIN_ROUNDS = 2
# Counts the calls that write below the run folder. The one that a file beside this module names fails, once.
FAILING_CALL = """
import builtins, io
from pathlib import Path

RUN, COUNT, ORDER = (str(Path(__file__).with_name(name)) for name in ("run", "calls", "failing_call"))
OPEN, NUMBER, LOCK = io.open, [0], threading.Lock()
with OPEN(ORDER) as file:
    FAILS_AT, ERROR = map(int, file.read().split())

def count(path):
    with LOCK:
        NUMBER[0] += 1
        with OPEN(COUNT, "w") as file:
            file.write(str(NUMBER[0]))
        if NUMBER[0] == FAILS_AT:
            raise OSError(ERROR, os.strerror(ERROR), path)

def counted(function):
    def call(path, *arguments, **settings):
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.path.abspath(os.fsdecode(path))
        if name.startswith(RUN):
            count(name)
        return function(path, *arguments, **settings)
    return call

for name in ("fsync", "mkdir", "rename", "replace"):
    setattr(os, name, counted(getattr(os, name)))

def open_file(path, mode="r", *arguments, **settings):
    writes = set(mode) & set("wax+") and not isinstance(path, int)
    return (counted(OPEN) if writes else OPEN)(path, mode, *arguments, **settings)

io.open = builtins.open = open_file

class Work(Faulty):
    pass
"""


def attack(trial: Trial) -> JsonObject:
    """Let the disk fail at points spread evenly over all that a run writes, and calls in random order."""
    expected, needed = _uninterrupted(trial)
    calls = trial.random.sample(range(1, needed[CALLS] + 1), needed[CALLS])
    rounds: list[JsonObject] = []
    done = dict.fromkeys(KINDS, 0)
    for number, kind in enumerate(cycle(KINDS)):
        if not trial.seconds_left() and number >= MIN_ROUNDS:
            break
        folder = trial.folder / f"round-{number}"
        if kind == CALLS:
            rounds.append(_call_fails(trial, folder, calls[done[kind] % len(calls)], expected))
        else:
            amount = max(1, int(_spread(done[kind] + 1) * needed[kind]))
            rounds.append(_disk_is_full(trial, folder, f"{kind}={amount}", expected))
        done[kind] += 1
        trial.say(str(rounds[-1]))
    ended = [each for each in rounds if each["exit_code"] != 0]
    return {
        "what": "the disk is full after so many bytes or files of a run, or one call that writes fails: open, fsync, "
        "mkdir, rename or replace; then the run is resumed on a disk that works",
        "checked": "one line and an exit code, every complete checkpoint whole, and the resumed run bit for bit equal "
        "to an uninterrupted one: weights, metrics, evaluations and completions",
        "whole_run": needed,
        "rounds": len(rounds),
        "by_kind": done,
        "ended_with_one_line": len(ended),
        "lines": sorted({each["line"] for each in ended}),
    }


def _uninterrupted(trial: Trial) -> tuple[Outcome, dict[str, int]]:
    """Return the outcome of a run, and the bytes, files and calls that it needs."""
    folder = trial.folder / "whole"
    needed = {"size": 0, "nr_inodes": 0}
    with _disk(folder / "run", AMPLE), ForkedRun(folder, _settings(folder)) as run:
        while not run.ended_within(0.05):
            needed = {limit: max(most, _used(run.folder)[limit]) for limit, most in needed.items()}
        expected = outcome(run.finish())
    needed[CALLS] = int((folder / "calls").read_text())
    trial.say(f"a whole run needs {needed}")
    return expected, needed


def _settings(folder: Path, failing_call: int = 0, error: int = 0) -> Settings:
    """Return the settings of a run whose rank counts its calls. failing_call: 0 for none."""
    folder.mkdir(parents=True, exist_ok=True)
    task = folder / "work.py"
    task.write_text(FAULTY_TASK + FAILING_CALL)
    (folder / CALLS).write_text(f"{failing_call} {error}")
    return deterministic(**SETTINGS, environments=[{"type": "task", "name": f"{task}:Work"}])


def _spread(number: int) -> float:
    """Return the van der Corput sequence in base 2: any number of its values is spread evenly over 0 to 1."""
    return sum(int(bit) / 2 ** (at + 1) for at, bit in enumerate(reversed(f"{number:b}")))


class _disk:
    """A tmpfs at `folder`, with these mount options."""

    def __init__(self, folder: Path, options: str) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        _mount("-t", "tmpfs", "-o", options, "tmpfs", str(folder))

    def __enter__(self) -> _disk:
        return self

    def __exit__(self, *_error: object) -> None:
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True)

    def grow(self) -> None:
        _mount("-o", f"remount,{AMPLE}", str(self._folder))


def _mount(*arguments: str) -> None:
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{error.stderr.strip()}; run this attack as root or through make chaos") from None


def _used(folder: Path) -> dict[str, int]:
    """Return the bytes and the files of a tmpfs."""
    line = subprocess.run(["df", "--output=used,iused", "-k", str(folder)], capture_output=True, text=True).stdout
    kib, inodes = map(int, line.splitlines()[1].split())
    return {"size": kib << 10, "nr_inodes": inodes}


def _disk_is_full(trial: Trial, folder: Path, case: str, expected: Outcome) -> JsonObject:
    with _disk(folder / "run", case) as disk:
        return _round(trial, case, folder, _settings(folder), disk.grow, expected)


def _call_fails(trial: Trial, folder: Path, number: int, expected: Outcome) -> JsonObject:
    error = trial.random.choice([errno.EIO, errno.ENOSPC])
    settings = _settings(folder, number, error)
    case = f"call {number} raises {errno.errorcode[error]}"
    return _round(trial, case, folder, settings, lambda: _settings(folder), expected)


def _round(
    trial: Trial, case: str, folder: Path, settings: Settings, mend: Callable[[], object], expected: Outcome
) -> JsonObject:
    """Run until the disk fails, mend it, and resume the run. It may also end without an error."""
    with ForkedRun(folder, settings, *AUTO) as run:
        code = again = run.wait()
    lines = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    clean = code == 0 or (len(lines) == 1 and "Traceback" not in run.stderr)
    trial.check(clean, f"{case}: exit code {code}, {len(lines)} error lines\n{run.tail()}")
    damaged = _damaged(run.folder)
    trial.check(not damaged, f"{case}: {damaged}")
    mend()
    if code != 0:
        with ForkedRun(folder, settings, *AUTO) as run:
            again = run.wait()
        trial.check(again == 0, f"{case}: the resumed run ended with {again}\n{run.tail()}")
    if again == 0:
        actual = outcome(run)
        other = [name for name, value in expected.items() if actual[name] != value]
        trial.check(not other, f"{case}: other {other} than without an error in {folder}")
    return {"case": case, "exit_code": code, "line": _general(lines[0], folder) if lines else None}


def _damaged(run_folder: Path) -> list[str]:
    problems = []
    for checkpoint in complete_checkpoints(run_folder / CHECKPOINTS):
        try:
            read_whole(checkpoint)
        except DamagedCheckpoint as error:
            problems.append(f"{checkpoint.name} is damaged: {error}")
    return problems


def outcome(run: TrainingRun) -> Outcome:
    return {
        "weights": exported(run),
        "metrics": without_wall_clock(run.rows(files.TRAIN)),
        "evaluations": without_wall_clock(run.rows(files.EVALUATION)),
        # Without the name of the task, which includes its folder.
        "completions": [row | {"source": None} for row in files.read_rollouts(run.folder)],
    }


def _general(line: str, folder: Path) -> str:
    """Return an error line without the folder of this trial."""
    return line.replace(str(folder), "FOLDER")
