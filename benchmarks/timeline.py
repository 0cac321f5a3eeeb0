"""Running completions over the seconds of training steps, without and with `rollout.partial`.

Runs of both kinds alternate and train the same prompts. The picture shows the last run of each kind.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import built_run, config_of, main_in_ranks, model_folder, rank_parser
from benchmarks.timeline_picture import decoding, picture
from colocated_grpo.errors import RunError
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.verdict import FINISHED, STOPPED
from colocated_grpo.settings.schema import Config
from colocated_grpo.tracking.files import METRICS_FILE, TRAIN, read_rows
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from colocated_grpo.rollout.engine import Finished
    from colocated_grpo.run import Run

WORK = {"prompts_per_step": 8, "group_size": 4, "max_prompt_tokens": 128, "max_completion_tokens": 256}
STEPS, SHOWN = 8, slice(2, 6)
"""Steps of a run, and those in the picture: with partial rollouts, the first and the last ones are not typical."""


class Recorder:
    """Wraps a run's clock and its engine's `step`, to record when phases and how many completions run."""

    def __init__(self, run: Run) -> None:
        self.steps: list[JsonObject] = []
        """For each training step: begin and end of phases, and 'running', which has an entry for each change:
        [seconds, running completions, decode steps until the next change]. All seconds are since the first step."""
        self._began = time.perf_counter()
        self._time, self._step, self._driver = run.clock.time, run.engine.step, run.collector.driver
        vars(run.clock)["time"], vars(run.engine)["step"] = self.time, self.step

    def now(self) -> float:
        return round(time.perf_counter() - self._began, 3)

    @contextmanager
    def time(self, phase: str) -> Generator[None]:
        if phase == "step":
            self.steps.append({"running": []})
        began = self.now()
        with self._time(phase):
            yield
        if phase in ("step", "generate", "train"):
            self.steps[-1][phase] = [began, self.now()]

    def step(self) -> Finished:
        """Count the running completions as `decode_tail` does, and decode."""
        changes, running = self.steps[-1]["running"], self._driver.running
        if not changes or changes[-1][1] != running:
            changes.append([self.now(), running, 0])
        changes[-1][2] += 1
        return self._step()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = rank_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind")
    parser.add_argument("--image", type=Path, help="SVG file to write")
    return main_in_ranks("timeline", parser, measure, arguments)


def measure(world: World, options: argparse.Namespace) -> JsonObject:
    """Train all runs. Collective; the timelines are those of rank 0's engine."""
    rows, timelines = [], {}
    with model_folder(options, world) as model:
        config = config_of(
            model,
            options,
            environments=[{"type": "task", "name": "benchmarks.workload:UnevenWork"}],
            training_steps=STEPS,
            deterministic=True,  # repeated runs differ in time only
            rollout={**WORK, "partial": {"oversample": 1.5, "max_age": 3}},
            evaluation={"every": 0},
            checkpoint={"every": 0, "final": False},
            tracking={"console": "plain", "rollouts_per_step": 0},
        )
        runs = {"without": config.with_values("rollout", partial=None), "with": config}
        for name in list(runs) * options.repeats:
            row, timelines[name] = train_once(runs[name], world)
            rows.append({"partial rollouts": name, **row})
            gc.collect()  # the objects of this run
    if options.image and world.is_main:
        options.image.write_text(picture(timelines))
    return {"rows": rows, "timelines": timelines}


def train_once(config: Config, world: World) -> tuple[dict[str, float], list[JsonObject]]:
    """Return the figures of a whole run, and the steps that are shown."""
    from colocated_grpo.trainer import train  # imports vLLM, which --help does not need

    with tempfile.TemporaryDirectory(prefix="benchmark-timeline-") as folder:
        with built_run(config, Path(folder), world) as run:
            recorder, cpu_began = Recorder(run), time.process_time()
            if train(run) == STOPPED:
                raise RunError("stopped: nothing was measured")
            cpu_seconds = time.process_time() - cpu_began
            run.tracker.close(FINISHED)
        rows = [row for row in read_rows(Path(folder) / METRICS_FILE) if row["kind"] == TRAIN]
    seconds = sum(row["seconds/step"] for row in rows)
    tokens = sum(row["tokens_per_second"] * row["seconds/step"] for row in rows)
    times = {"tokens/s": tokens / seconds, "seconds": seconds, "cpu seconds": cpu_seconds}
    return {**times, **decoding(recorder.steps)}, recorder.steps[SHOWN]


if __name__ == "__main__":
    sys.exit(main())
