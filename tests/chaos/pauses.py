"""Ranks that stand still for a while, clocks that jump, a slow disk: the run goes on, and its result is the same."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colocated_grpo.types import JsonObject
from tests.chaos.disk import outcome
from tests.chaos.trial import Trial
from tests.support.faulty_runs import FAULTY_TASK
from tests.support.training_runs import ForkedRun, Settings, TrainingRun, deterministic

STEPS = 12
RANKS = 2
LONGEST_PAUSE = 15.0
PAUSES = 2
"""Number in each run."""
SETTINGS: Settings = {
    "training_steps": STEPS,
    "checkpoint": {"every": 3, "export_every": 6},
    "evaluation": {"every": 6, "prompts": 4},
}
# `time.time` and `time.time_ns` jump by up to a day, in both directions, whenever a completion is scored. Setting the
# kernel's clock needs privileges; its monotonic clock, which all time limits use, never jumps.
CLOCK = """
import random, time
NOW, NOW_NS, OFFSET, CHANCE = time.time, time.time_ns, [0.0], random.Random(RANK)
time.time = lambda: NOW() + OFFSET[0]
time.time_ns = lambda: NOW_NS() + int(OFFSET[0] * 1e9)

class Work(Faulty):
    def score(self, item, completion):
        OFFSET[0] = CHANCE.uniform(-86400, 86400)
        return super().score(item, completion)
"""
# Every file that Python opens for writing is slow, and so is every fsync.
SLOW_DISK = """
import builtins, io, random, time
CHANCE, OPEN, SYNC = random.Random(RANK), io.open, os.fsync

def slow_open(file, mode="r", *arguments, **settings):
    if set(mode) & set("wax+"):
        time.sleep(CHANCE.uniform(0, 0.3))
    return OPEN(file, mode, *arguments, **settings)

def slow_fsync(descriptor):
    time.sleep(CHANCE.uniform(0, 1.5))
    SYNC(descriptor)

io.open = builtins.open = slow_open
os.fsync = slow_fsync

class Work(Faulty):
    pass
"""
PLAIN = "\nclass Work(Faulty):\n    pass\n"


def attack(trial: Trial) -> JsonObject:
    """Disturb one run after another until the time is up, each kind at least once."""
    with ForkedRun(trial.folder / "whole", _settings(trial.folder / "whole", PLAIN), ranks=RANKS) as run:
        expected = outcome(run.finish())
    kinds: dict[str, Callable[[Trial, Path, JsonObject], TrainingRun]] = {
        "one rank stopped by SIGSTOP": _stopped,
        "all ranks stopped by SIGSTOP": _suspended,
        "clocks that jump by up to a day": lambda trial, folder, figures: _disturbed(folder, CLOCK),
        "slow disk": lambda trial, folder, figures: _disturbed(folder, SLOW_DISK),
    }
    results: dict[str, JsonObject] = {name: {"runs": 0} for name in kinds}
    number = 0
    while trial.seconds_left() or number < len(kinds):
        name = list(kinds)[number % len(kinds)]
        figures = results[name]
        run = kinds[name](trial, trial.folder / f"run-{number}", figures)
        figures["runs"] += 1
        actual = outcome(run)
        other = [part for part, value in expected.items() if actual[part] != value]
        trial.check(not other, f"{name}: other {other} in {run.folder}")
        trial.say(f"{name}: {figures}")
        number += 1
    return {
        "what": f"runs of {STEPS} steps on {RANKS} ranks, disturbed, and compared bit for bit with an undisturbed one: "
        "weights, metrics, evaluations and completions",
        "clocks": "time.time and time.time_ns replaced inside the ranks; the kernel's clock was not changed",
        "disk": "open() for writing up to 0.3 s slower and fsync up to 1.5 s, in Python code alone",
        "kinds": results,
    }


def _settings(folder: Path, code: str) -> Settings:
    folder.mkdir(parents=True)
    task = folder / "work.py"
    task.write_text(FAULTY_TASK + code)
    return deterministic(**SETTINGS, environments=[{"type": "task", "name": f"{task}:Work"}])


def _disturbed(folder: Path, code: str) -> TrainingRun:
    with ForkedRun(folder, _settings(folder, code), ranks=RANKS) as run:
        return run.finish()


def _stopped(trial: Trial, folder: Path, figures: JsonObject) -> TrainingRun:
    return _paused(trial, folder, figures, lambda run: [trial.random.choice(run.ranks())])


def _suspended(trial: Trial, folder: Path, figures: JsonObject) -> TrainingRun:
    return _paused(trial, folder, figures, lambda run: run.processes())


def _paused(trial: Trial, folder: Path, figures: JsonObject, choose: Callable[[ForkedRun], list[Any]]) -> TrainingRun:
    """Stop the chosen processes for a while, PAUSES times, after a random number of steps."""
    with ForkedRun(folder, _settings(folder, PLAIN), ranks=RANKS) as run:
        for steps in sorted(trial.random.sample(range(STEPS - 1), PAUSES)):
            run.wait_until(lambda steps=steps: run.stdout.count("\nstep ") >= steps)
            if run.ended_within(trial.random.uniform(0, 0.5)):
                break
            chosen, pause = choose(run), trial.random.uniform(1, LONGEST_PAUSE)
            for process in chosen:
                process.send_signal(signal.SIGSTOP)
            time.sleep(pause)
            for process in chosen:
                process.send_signal(signal.SIGCONT)
            figures["pauses"] = figures.get("pauses", 0) + 1
            figures["longest_pause_seconds"] = max(figures.get("longest_pause_seconds", 0.0), round(pause, 1))
        return run.finish()
