"""A disk that is full after so many bytes or files: the run ends with one line, and resumes when there is space.

The run folder is a tmpfs of its own. Mounting it needs root, or `unshare --map-root-user --mount` before the command.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from colocated_grpo.checkpoint.saved import DamagedCheckpoint, read_whole
from colocated_grpo.runtime.run_folder import CHECKPOINTS, complete_checkpoints
from colocated_grpo.tracking import files
from colocated_grpo.types import JsonObject
from tests.chaos.kills import exported
from tests.chaos.trial import Trial
from tests.support.training_runs import ForkedRun, Settings, TrainingRun, deterministic, without_wall_clock

STEPS = 6
AMPLE = "size=256m,nr_inodes=100k"
SETTINGS: Settings = {
    "training_steps": STEPS,
    "checkpoint": {"every": 2, "export_every": 4, "keep_last": 2},
    "evaluation": {"every": 3, "prompts": 4},
}
INODES = 4
"""Every so many rounds the number of files is limited instead of their bytes."""
MIN_ROUNDS = 2


def attack(trial: Trial) -> JsonObject:
    """Fill the disk at points spread evenly over all that a run writes."""
    whole = trial.folder / "whole"
    with _disk(whole / "run", AMPLE), ForkedRun(whole, deterministic(**SETTINGS)) as run:
        needed = {"size": 0, "nr_inodes": 0}
        while not run.ended_within(0.05):
            needed = {limit: max(most, _used(run.folder)[limit]) for limit, most in needed.items()}
        run.finish()
        expected = outcome(run)
    trial.say(f"a whole run needs {needed}")
    rounds: list[JsonObject] = []
    while trial.seconds_left() or len(rounds) < MIN_ROUNDS:
        limit = "nr_inodes" if len(rounds) % INODES == INODES - 1 else "size"
        share = _spread(len(rounds) + 1)
        amount = max(1, int(share * needed[limit]))
        rounds.append(_round(trial, len(rounds), limit, amount, expected))
        trial.say(str(rounds[-1]))
    ended = [each for each in rounds if each["exit_code"] != 0]
    return {
        "what": "the disk is full after so many bytes or files of a run; then there is space again and it is resumed",
        "checked": "one line and an exit code, every complete checkpoint whole, and the resumed run bit for bit equal "
        "to an uninterrupted one: weights, metrics, evaluations and completions",
        "whole_run": needed,
        "rounds": len(rounds),
        "ended_with_one_line": len(ended),
        "lines": sorted({each["line"] for each in ended}),
    }


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


def _round(trial: Trial, number: int, limit: str, amount: int, expected: dict[str, Any]) -> JsonObject:
    folder = trial.folder / f"round-{number}"
    case = f"{limit}={amount}"
    with _disk(folder / "run", case) as disk:
        with ForkedRun(folder, deterministic(**SETTINGS), "--resume", "auto") as run:
            code = run.wait()
        lines = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
        clean = code == 0 or (len(lines) == 1 and "Traceback" not in run.stderr)
        trial.check(clean, f"{case}: exit code {code}, {len(lines)} error lines\n{run.tail()}")
        damaged = _damaged(run.folder)
        trial.check(not damaged, f"{case}: {damaged}")
        disk.grow()
        if code != 0:
            with ForkedRun(folder, deterministic(**SETTINGS), "--resume", "auto") as run:
                again = run.wait()
            trial.check(again == 0, f"{case}: the resumed run ended with {again}\n{run.tail()}")
        if code == 0 or again == 0:
            actual = outcome(run)
            other = [name for name, value in expected.items() if actual[name] != value]
            trial.check(not other, f"{case}: other {other} than without a full disk")
    return {"limit": case, "exit_code": code, "line": _general(lines[0], folder) if lines else None}


def _damaged(run_folder: Path) -> list[str]:
    problems = []
    for checkpoint in complete_checkpoints(run_folder / CHECKPOINTS):
        try:
            read_whole(checkpoint)
        except DamagedCheckpoint as error:
            problems.append(f"{checkpoint.name} is damaged: {error}")
    return problems


def outcome(run: TrainingRun) -> dict[str, Any]:
    """Return what two equal runs have in common."""
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
