"""SIGKILL at random moments of whole runs, which are resumed until they end, and end as uninterrupted runs do.

On CPUs, runs of several kinds. On a machine with two GPUs, runs on both of them; after each kill the devices' memory
must be as before the run.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from colocated_grpo.tracking import files
from colocated_grpo.types import JsonObject
from tests.chaos.trial import Trial
from tests.support.serve_process import ServeProcess
from tests.support.served_runs import PARTIAL, SERVER_FLAGS, work, write_task
from tests.support.training_runs import (
    POLL_SECONDS,
    ForkedRun,
    LaunchedRun,
    Settings,
    TrainingRun,
    checkpoint_tensors,
    deterministic,
    tiny_model,
    train,
    without_wall_clock,
)

TARGET = 200
STEPS = 16
AUTO = ("--resume", "auto")
DURING_START = 0.4
"""Share of the kills while a run starts. The others wait for a step, so that a run gets to its end."""
STEPS_BEFORE_A_KILL = 5.0
ONE_RANK = 0.5
"""Share of the kills after the start of several ranks that kill one of them. The others must end by themselves; while
they start this is the launcher's work, which these runs do without."""
SECONDS_TO_END = 60.0
SECONDS_TO_FREE_MEMORY = 10.0
CLOSE = 1e-4
"""Largest difference of a weight after all updates on other numbers of ranks: a tenth of one update."""
SAVING: Settings = {"checkpoint": {"every": 2, "export_every": 4}, "training_steps": STEPS}


@dataclass
class Kind:
    """One kind of run, and what has happened to its runs."""

    settings: Settings
    ranks: tuple[int, ...] = (1,)
    """Numbers of ranks of the starts of a run, in turn. The last start may have any of them."""
    gpus: int = 0
    """GPUs of a run that the launcher starts. 0: ranks on CPUs, which are forked."""
    runs: int = 0
    kills: int = 0
    during_start: int = 0
    of_one_rank: int = 0
    differences: list[float] = field(default_factory=list)
    """Largest difference of a weight from the uninterrupted run, where ranks change."""
    device_memory_mib: list[list[int]] = field(default_factory=list)
    """Memory in use on each GPU before the first run, and then after each kill."""
    whole: TrainingRun | None = None
    start_seconds: float = 0.0
    step_seconds: float = 0.0

    @property
    def bit_for_bit(self) -> bool:
        return len(set(self.ranks)) == 1

    def start(self, folder: Path, *flags: str, ranks: int) -> LaunchedRun | ForkedRun:
        if self.gpus:
            return LaunchedRun(folder, self.settings, *flags, gpus=self.gpus)
        return ForkedRun(folder, self.settings, *flags, ranks=ranks)


def attack(trial: Trial) -> JsonObject:
    """Kill runs of all kinds in turn until the time is up or TARGET kills are reached."""
    if torch.cuda.device_count() >= 2:
        kinds = {"two GPUs": Kind(deterministic(**SAVING), ranks=(2,), gpus=2)}
        _kill_in_turn(trial, kinds)
    else:
        task = write_task(trial.folder)
        with ServeProcess(tiny_model(), *SERVER_FLAGS) as server:
            server.wait_until_ready()
            train(trial.folder / "first", deterministic(training_steps=1))  # waits for the imports of the fork server
            kinds = _on_cpus(task, server)
            _kill_in_turn(trial, kinds)
    return {
        "what": "SIGKILL at random moments; runs resumed with --resume auto until they end, and compared with one "
        "uninterrupted run of their kind",
        "compared_bit_for_bit": "weights, optimizer state, metrics without times, evaluations, completions and rewards",
        "compared_where_ranks_change": "steps, prompts, completions and rewards are equal; the weights differ by at "
        f"most {CLOSE}, because sums over other numbers of ranks round differently",
        "target_kills": TARGET,
        "kills": sum(kind.kills for kind in kinds.values()),
        "kinds": {name: _figures(kind) for name, kind in kinds.items()},
    }


def _on_cpus(task: Path, server: ServeProcess) -> dict[str, Kind]:
    # Adam divides by the size of the gradient: with a small eps, rounding noise would become whole updates.
    calm: Settings = {"policy": {"optimizer": {"eps": 1e-3}}}
    return {
        "full training": Kind(deterministic(**SAVING)),
        "LoRA": Kind(deterministic(**SAVING, policy={"lora": {"rank": 4}, "lr": 0.02})),
        "engine server": Kind(work(task, server, **SAVING)),
        "partial rollouts": Kind(work(task, **SAVING, rollout=PARTIAL), ranks=(2,)),
        "two ranks": Kind(deterministic(**SAVING), ranks=(2,)),
        "2, 1, 2, ... ranks": Kind(deterministic(**SAVING, **calm), ranks=(2, 1)),
    }


def _kill_in_turn(trial: Trial, kinds: dict[str, Kind]) -> None:
    for number, (name, kind) in enumerate(cycle(kinds.items())):
        if not trial.seconds_left() or sum(kind.kills for kind in kinds.values()) >= TARGET:
            break
        _run(trial, kind, trial.folder / f"{name.replace(' ', '-')}-{number}")
        trial.say(f"{name}: {kind.kills} kills in {kind.runs} runs, {trial.seconds_left():.0f} s left")


def _figures(kind: Kind) -> JsonObject:
    return {
        "runs": kind.runs,
        "kills": kind.kills,
        "while_starting": kind.during_start,
        "of_one_rank": kind.of_one_rank,
        "bit_for_bit": kind.bit_for_bit,
        **({} if kind.bit_for_bit else {"largest_weight_difference": max(kind.differences, default=None)}),
        **({"device_memory_mib_before_and_after_each_kill": kind.device_memory_mib} if kind.gpus else {}),
    }


def _run(trial: Trial, kind: Kind, folder: Path) -> None:
    """Start, kill and resume one run until it ends, and compare it."""
    if kind.whole is None:
        if kind.gpus:
            kind.device_memory_mib.append(_device_memory_mib())
        _uninterrupted(kind, folder.with_name(f"{folder.name}-whole"))
    assert kind.whole is not None
    kind.runs += 1
    for attempt in count():
        ranks = kind.ranks[attempt % len(kind.ranks)]
        with kind.start(folder, *AUTO, ranks=ranks) as run:
            try:
                if not trial.seconds_left() or _ended_before_the_kill(trial, kind, run, ranks):
                    run.finish()
                    break
            except AssertionError as error:
                trial.check(False, f"{folder}: {error}")
                return
        kind.kills += 1
        if kind.gpus:
            _check_device_memory(trial, kind)
    for problem in _differences(kind, run, kind.whole):
        trial.check(False, f"{folder}: {problem}")


def _check_device_memory(trial: Trial, kind: Kind) -> None:
    """Check that a kill has freed all device memory; the driver may take a moment."""
    before, until = kind.device_memory_mib[0], time.monotonic() + SECONDS_TO_FREE_MEMORY
    while (after := _device_memory_mib()) != before and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    kind.device_memory_mib.append(after)
    trial.check(after == before, f"{after} MiB in use after a kill, {before} before the first run")


def _device_memory_mib() -> list[int]:
    """Return the memory in use on each visible GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    used = subprocess.run([*command, *(["-i", visible] if visible else [])], capture_output=True, text=True, check=True)
    return [int(line) for line in used.stdout.split()]


def _uninterrupted(kind: Kind, folder: Path) -> None:
    """Train the run that the others must equal, and measure it."""
    began = time.monotonic()
    with kind.start(folder, ranks=kind.ranks[0]) as run:
        run.wait_for_step(0)
        kind.start_seconds = time.monotonic() - began
        run.finish()
    kind.step_seconds = (time.monotonic() - began - kind.start_seconds) / STEPS
    kind.whole = run


def _ended_before_the_kill(trial: Trial, kind: Kind, run: LaunchedRun | ForkedRun, ranks: int) -> bool:
    """Kill the run at a random moment. Returns True if it has ended before that."""
    if trial.random.random() < DURING_START:
        if run.ended_within(trial.random.uniform(0, kind.start_seconds)):
            return True
        kind.during_start += 1
    else:
        # Steps are counted: on a machine with other work their time varies too much to be predicted.
        steps = trial.random.uniform(0, STEPS_BEFORE_A_KILL)
        while run.stdout.count("\nstep ") <= int(steps):
            if run.ended_within(0.02):
                return True
        if run.ended_within(steps % 1 * kind.step_seconds):
            return True
        if ranks > 1 and trial.random.random() < ONE_RANK:
            kind.of_one_rank += 1
            trial.random.choice(run.ranks()).kill()
            trial.check(run.wait(SECONDS_TO_END) != 0, f"{run.folder}: exit code 0 after one rank was killed")
    run.kill()
    return False


def _differences(kind: Kind, run: TrainingRun, whole: TrainingRun) -> list[str]:
    steps = [row["step"] for row in run.rows(files.TRAIN)]
    compared: dict[str, Callable[[TrainingRun], Any]] = {
        "rollouts": lambda run: files.read_rollouts(run.folder),
    }
    if kind.bit_for_bit:
        compared |= {
            "exported weights": exported,
            "metrics": lambda run: without_wall_clock(run.rows(files.TRAIN)),
            "evaluations": lambda run: without_wall_clock(run.rows(files.EVALUATION)),
        }
    problems = [] if steps == list(range(STEPS)) else [f"trained steps {steps}"]
    problems += [f"other {name} than {whole.folder}" for name, of in compared.items() if of(run) != of(whole)]
    if kind.bit_for_bit:
        ours, theirs = checkpoint_tensors(run.folder), checkpoint_tensors(whole.folder)
        if ours.keys() != theirs.keys() or not all(ours[name].equal(theirs[name]) for name in ours):
            problems.append(f"other tensors in the last checkpoint than {whole.folder}")
    else:
        kind.differences.append(_weights_differ_by(run, whole))
        if kind.differences[-1] > CLOSE:
            problems.append(f"weights differ from those of {whole.folder} by {kind.differences[-1]}")
    left = sorted(path.name for path in run.folder.rglob("*.partial"))
    return [*problems, *(f"{name} was left behind" for name in left)]


def exported(run: TrainingRun) -> dict[str, bytes]:
    """Return the contents of all exported weight files by path."""
    found = sorted(run.folder.rglob("*.safetensors"))
    assert found
    return {path.relative_to(run.folder).as_posix(): path.read_bytes() for path in found}


def _weights_differ_by(run: TrainingRun, whole: TrainingRun) -> float:
    ours, theirs = (load_file(each.folder / "final_model/model.safetensors") for each in (run, whole))
    return max((ours[name].float() - theirs[name].float()).abs().max().item() for name in theirs)
