"""A run of 1,000 steps: memory, threads, descriptors and shared memory stay flat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from colocated_grpo.tracking import files
from colocated_grpo.types import JsonObject
from tests.chaos.trial import Trial
from tests.support.training_runs import ForkedRun, TrainingRun, deterministic

MIB = 1 << 20
STEPS = 1000
WARM_UP = 200
"""Steps before the lines are fitted: caches fill, and the first checkpoints and evaluations are made."""
BOUNDS = {"memory_mib": 30.0, "threads": 2.0, "descriptors": 2.0, "shared_memory_files": 1.0, "processes": 1.0}
"""Largest growth over 1,000 steps, by the fitted line."""
INTERVAL = 2.0


def attack(trial: Trial) -> JsonObject:
    """Train, and measure all processes of the run every few seconds. Ends early when the time is up."""
    config = deterministic(
        training_steps=STEPS,
        rollout={"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 4},
        checkpoint={"every": 20, "export_every": 100},
        evaluation={"every": 50, "prompts": 2},
    )
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with ForkedRun(trial.folder, config) as run:
        run.wait_for_step(0)
        while not run.ended_within(INTERVAL):
            step = _last_step(run)
            for name, value in _measure(run).items():
                series[name].append((step, value))
            if not trial.seconds_left():
                run.terminate()
        code = run.wait()
    trial.check(code == 0, f"the run ended with {code}\n{run.tail()}")
    steps = len(run.rows(files.TRAIN))
    growth = {}
    for name, points in series.items():
        late = [point for point in points if point[0] >= min(WARM_UP, steps / 2)]
        growth[name] = round(1000 * slope(late), 3)
        trial.check(growth[name] <= BOUNDS[name], f"{name} grows by {growth[name]} in 1,000 steps")
    return {
        "what": "one run; growth is the slope of a line fitted after the warm-up, for 1,000 steps",
        "target_steps": STEPS,
        "steps": steps,
        "warm_up_steps": min(WARM_UP, steps // 2),
        "growth_in_1000_steps": growth,
        "bounds": BOUNDS,
        "first_and_last": {name: [points[0][1], points[-1][1]] for name, points in series.items()},
        "samples": len(next(iter(series.values()))),
    }


def _last_step(run: TrainingRun) -> float:
    rows = run.rows(files.TRAIN)
    return float(rows[-1]["step"]) if rows else 0.0


def _measure(run: TrainingRun) -> dict[str, float]:
    """Return what all processes of the run use, and the files in shared memory of all programs."""
    totals = dict.fromkeys(("memory_mib", "threads", "descriptors", "processes"), 0.0)
    for process in run.processes():
        with suppress(psutil.NoSuchProcess), process.oneshot():
            totals["memory_mib"] += process.memory_full_info().uss / MIB
            totals["threads"] += process.num_threads()
            totals["descriptors"] += process.num_fds()
            totals["processes"] += 1
    return totals | {"shared_memory_files": float(len(list(Path("/dev/shm").iterdir())))}


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through (x, y) points; 0 for fewer than two."""
    if len(points) < 2:
        return 0.0
    x, y = np.array(points, dtype=np.float64).T
    return float(np.polyfit(x - x[0], y, 1)[0])
