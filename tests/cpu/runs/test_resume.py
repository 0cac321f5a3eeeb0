"""A run that is killed or stopped at any moment resumes and ends bit for bit like an uninterrupted one."""

from __future__ import annotations

import json
import shutil
import signal

import psutil
import pytest

from colocated_grpo.tools import compare_runs
from colocated_grpo.tracking import files
from tests.support.training_runs import (
    STEPS,
    LaunchedRun,
    TrainingRun,
    deterministic,
    settings,
    tiny_model,
    train,
    uninterrupted,
    weights_of,
    without_wall_clock,
)

SECONDS_TO_END = 120
HELD_STEP = 8


def checkpoints(run: TrainingRun) -> list[str]:
    return sorted(path.name for path in (run.folder / "checkpoints").iterdir())


def newest_step(run: TrainingRun) -> int:
    newest = max((run.folder / "checkpoints").glob("step_*[0-9]"))
    return json.loads((newest / "trainer.json").read_text())["step"]


def starts(run: TrainingRun) -> list[int]:
    return [start["first_step"] for start in files.read_environment(run.folder)]


def assert_equals_the_uninterrupted(run: TrainingRun, ranks: int) -> None:
    whole = uninterrupted(ranks)
    assert weights_of(run) == weights_of(whole)
    assert compare_runs.main([str(run.folder), str(whole.folder), "--assert-equal"]) == 0
    for kind, count in ((files.TRAIN, STEPS), (files.EVALUATION, STEPS // 4 + 1)):
        rows = without_wall_clock(run.rows(kind))
        assert rows == without_wall_clock(whole.rows(kind))
        assert len(rows) == count
    assert files.read_rollouts(run.folder) == files.read_rollouts(whole.folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_rank_ends_after_the_death_of_its_launcher(tmp_path, ranks):
    with LaunchedRun(tmp_path, deterministic(training_steps=10_000), ranks=ranks) as run:
        run.wait_for_step(1)
        run.ranks()[-1].suspend()
        run.launcher.kill()
        assert psutil.wait_procs(run.processes(), SECONDS_TO_END)[1] == []


def test_killing_one_rank_ends_the_others_and_the_run_resumes_bit_for_bit(tmp_path):
    hold = {"hold_before": HELD_STEP, "held_rank": 1}
    with LaunchedRun(tmp_path, deterministic(hold), ranks=2) as run:
        run.wait_for_step(HELD_STEP - 1)
        run.ranks()[1].kill()
        assert run.wait(SECONDS_TO_END) != 0
        assert run.processes() == []
    [line] = run.stderr.splitlines()
    assert line.startswith("error: the run was ended from outside, rank 1 by SIGKILL: ")
    resumed = train(tmp_path, deterministic(), "--resume", "auto", ranks=2)
    assert starts(resumed) == [0, first_step_of_last_start(resumed)]
    assert_equals_the_uninterrupted(resumed, ranks=2)


def first_step_of_last_start(run: TrainingRun) -> int:
    """Return the first step of the last start, read from the console."""
    first = next(line for line in run.stdout.splitlines() if line.startswith("step "))
    return int(first.split()[1].partition("/")[0])


def test_an_interrupt_saves_a_checkpoint_and_the_run_resumes_bit_for_bit(tmp_path):
    config = deterministic({"hold_before": HELD_STEP}, checkpoint={"every": 0})
    with LaunchedRun(tmp_path, config, ranks=2) as run:
        run.wait_for_step(HELD_STEP - 1)
        assert run.listening() == {"127.0.0.1"}, "the ranks of one node cannot be reached from a network"
        run.launcher.send_signal(signal.SIGINT)
        assert run.wait(SECONDS_TO_END) == 130, run.tail()
        assert run.processes() == []
    assert len(run.rows(files.TRAIN)) == HELD_STEP
    assert newest_step(run) == HELD_STEP
    assert checkpoints(run) == [f"step_{HELD_STEP:06d}"]
    assert files.read_summary(run.folder)["state"] == "stopped"
    resumed = train(tmp_path, deterministic(checkpoint={"every": 0}), "--resume", str(run.folder), ranks=2)
    assert starts(resumed) == [0, HELD_STEP]
    assert_equals_the_uninterrupted(resumed, ranks=2)


def test_a_partial_checkpoint_is_ignored_and_a_finished_run_can_be_extended(tmp_path):
    """A checkpoint that a kill interrupted keeps its .partial name, and the next save replaces it."""
    partial = tmp_path / "run/checkpoints/step_000002.partial"
    partial.mkdir(parents=True)
    (partial / "trainer.json").write_text('{"step": 2}')
    changes = {"evaluation": {"every": 0}, "checkpoint": {"every": 2, "keep_last": 1, "export_every": 3}}
    exported = tmp_path / "run/step_3"
    (exported / "of_a_lost_attempt").mkdir(parents=True)
    short = train(tmp_path, deterministic(training_steps=3, **changes), "--resume", "auto")
    assert starts(short) == [0]
    assert checkpoints(short) == ["step_000003"]
    assert not (exported / "of_a_lost_attempt").exists()
    shutil.rmtree(exported)  # the state after a kill between a checkpoint and its export
    more = train(tmp_path, deterministic(training_steps=5, **changes), "--resume", str(short.folder))
    assert starts(more) == [0, 3]
    assert (exported / "config.json").is_file()
    assert [row["step"] for row in more.rows(files.TRAIN)] == [0, 1, 2, 3, 4]


def test_resuming_with_a_model_of_another_shape_is_rejected_before_any_rank_starts(tmp_path):
    trained, other = uninterrupted(2).folder, tiny_model("qwen2")
    with LaunchedRun(tmp_path, settings(other), "--resume", str(trained), ranks=2) as run:
        assert run.wait() == 2
        assert run.stdout == ""
        assert run.stderr == (
            f"error: model.name='{other}': model_type is qwen2, but qwen3 in the checkpoint "
            f"{trained}/checkpoints/step_{STEPS:06d}; resume with a model of the same shape\n"
        )
