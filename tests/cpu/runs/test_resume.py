"""Killed or asked to stop at any moment, a run goes on where it was and ends as if nothing had happened."""

from __future__ import annotations

import json
import shutil
import signal

from colocated_grpo.tools import compare_runs
from colocated_grpo.tracking import files

from tests.support.training_runs import (
    STEPS,
    LaunchedRun,
    TrainingRun,
    deterministic,
    launch,
    settings,
    tiny_model,
    train,
    uninterrupted,
    wall_clock_free,
    weights_of,
)

SECONDS_TO_END = 30


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
        rows = wall_clock_free(run.rows(kind))
        assert rows == wall_clock_free(whole.rows(kind))
        assert len(rows) == count
    assert files.read_rollouts(run.folder) == files.read_rollouts(whole.folder)


def test_killing_one_rank_ends_the_others_and_the_run_resumes_and_ends_the_same(tmp_path):
    with LaunchedRun(tmp_path, deterministic(), ranks=2) as run:
        run.wait_for_step(7)
        run.ranks()[1].kill()
        assert run.wait(SECONDS_TO_END) != 0
        assert run.processes() == []
    resumed = launch(tmp_path, deterministic(), "--resume", "auto", ranks=2)
    assert starts(resumed) == [0, newest_step_before(resumed)]
    assert_equals_the_uninterrupted(resumed, ranks=2)


def newest_step_before(run: TrainingRun) -> int:
    """Where the last start began, read from the console."""
    first = next(line for line in run.stdout.splitlines() if line.startswith("step "))
    return int(first.split()[1].partition("/")[0])


def test_a_signal_saves_the_very_step_and_the_run_resumes_from_it_and_ends_the_same(tmp_path):
    with LaunchedRun(tmp_path, deterministic(checkpoint={"every": 0}), ranks=2) as run:
        run.wait_for_step(5)
        run.launcher.send_signal(signal.SIGINT)
        assert run.wait(SECONDS_TO_END) == 130, run.tail()
        assert run.processes() == []
    done = len(run.rows(files.TRAIN))
    assert 5 < done < STEPS
    assert newest_step(run) == done
    assert checkpoints(run) == [f"step_{done:06d}"]
    assert files.read_summary(run.folder)["outcome"] == "stopped"
    resumed = train(tmp_path, deterministic(checkpoint={"every": 0}), "--resume", str(run.folder), ranks=2)
    assert starts(resumed) == [0, done]
    assert_equals_the_uninterrupted(resumed, ranks=2)


def test_an_unfinished_checkpoint_is_never_read_and_a_finished_run_can_be_continued(tmp_path):
    """What a kill leaves in the middle of a write goes by another name, and the next save replaces it."""
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
    shutil.rmtree(exported)  # as a kill between a checkpoint and its export leaves it
    more = train(tmp_path, deterministic(training_steps=5, **changes), "--resume", str(short.folder))
    assert starts(more) == [0, 3]
    assert (exported / "config.json").is_file()
    assert [row["step"] for row in more.rows(files.TRAIN)] == [0, 1, 2, 3, 4]


def test_a_model_of_another_shape_is_refused_before_any_rank_starts(tmp_path):
    trained, other = uninterrupted(2).folder, tiny_model("qwen2")
    with LaunchedRun(tmp_path, settings(other), "--resume", str(trained), ranks=2) as run:
        assert run.wait() == 2
        assert run.stdout == ""
        assert run.stderr == (
            f"error: model.name='{other}': model_type is qwen2, but qwen3 in the checkpoint "
            f"{trained}/checkpoints/step_{STEPS:06d}; resume with a model of the same shape\n"
        )
