"""Runs with a fault inside the trainer or the engine, injected by user code."""

from __future__ import annotations

from pathlib import Path

from tests.support.servers import until
from tests.support.training_runs import Settings, TrainingRun, settings, tiny_model

# User code is imported on every rank, so a task can inject faults without changes to the package.
FAULTY_TASK = """
import os, threading
from colocated_grpo.environments.tasks.procedural import Sorting
RANK = os.environ["RANK"]

class Faulty(Sorting):
    def score(self, item, completion):
        return judge() if judge else super().score(item, completion)

judge = None
"""


def faulty(tmp_path: Path, fault: str, folder: Path | None = None, **changes: object) -> Settings:
    """Settings of a run with the sorting task.

    fault: statements of the task's module, which may set `judge`. folder: of the model, by default a tiny one.
    """
    path = tmp_path / "faulty.py"
    path.write_text(FAULTY_TASK + fault)
    environments = [{"type": "task", "name": f"{path}:Faulty"}]
    return settings(folder or tiny_model(), environments=environments, evaluation={"every": 0}, **changes)


def failed(run: TrainingRun) -> TrainingRun:
    """Wait for a run to end with an error, and check that it leaves no process."""
    with run:
        assert run.wait() != 0, run.tail()
        until(lambda: run.processes() == [])  # processes that a forked rank has started end after it
        return run
