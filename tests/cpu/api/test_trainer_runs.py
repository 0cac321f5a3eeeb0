"""Runs of Trainer, with the real engine: one process after another run, and several ranks of one program."""

from __future__ import annotations

import pytest

from colocated_grpo.runtime.run_folder import read_record
from colocated_grpo.tracking import files
from tests.support.programs import fail_after_the_engine, four_runs, steered, trained_twice
from tests.support.ranks import Ranks
from tests.support.training_runs import tiny_model

TIMEOUT = 300.0


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    with Ranks(four_runs, 1, tiny_model(), tmp_path_factory.mktemp("programs")) as process:
        return process.results(TIMEOUT)[0]


def test_a_program_trains_its_functions_on_its_rows_and_gets_the_result(seen):
    result = seen["result"]
    assert (result.outcome, result.steps) == ("finished", 3)
    assert result.checkpoint == result.folder / "checkpoints/step_000003"
    assert (result.model, result.best_model) == (result.folder / "final_model", None)
    rows = [row for row in files.read_metrics(result.folder) if row["kind"] == files.TRAIN and row["step"] == 2]
    taken = {"train_runtime", "train_steps_per_second", "train_loss"}
    last = {key: value for key, value in rows[0].items() if key not in ("kind", "step")}
    assert {key: value for key, value in result.metrics.items() if key not in taken} == last
    assert 0 <= result.evaluation["held_out/reward"] <= 1


def test_functions_given_as_objects_run_in_threads_of_the_rank(seen):
    assert seen["threads"] == {"reward"}


def test_the_saved_config_names_functions_and_rows(seen):
    [entry] = seen["config"]["environments"]
    assert (entry["name"], entry["eval_split"]) == ("train_dataset", "eval_datasets")
    assert [reward["name"] for reward in entry["rewards"]] == ["tests.support.programs:Recorder"]


def test_callbacks_follow_the_run_and_add_metrics(seen):
    assert seen["events"] == [
        ("evaluate", 0),
        ("step", 0),
        ("step", 1),
        ("step", 2),
        ("evaluate", 3),
        ("checkpoint", 3),
        ("finished", 2),
    ]
    metrics = seen["result"].metrics
    assert metrics["double"] == 2 * metrics["reward"]


def test_a_notebook_shows_the_report_of_the_result(seen):
    assert seen["report"].startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert "<script" not in seen["report"]


def test_a_second_run_in_the_process_continues_the_first(seen):
    resumed = seen["resumed"]
    assert (resumed.folder, resumed.steps, resumed.outcome) == (seen["result"].folder, 4, "finished")
    assert [start["first_step"] for start in files.read_environment(resumed.folder)] == [0, 3]
    assert (seen["result"].first_step, resumed.first_step) == (0, 3)
    assert resumed.metrics["train_runtime"] * resumed.metrics["train_steps_per_second"] == pytest.approx(1)


def test_an_error_is_one_line_without_the_frames_of_the_run(seen):
    failed, existing = seen["errors"]
    assert failed[0] == "RunError"
    assert failed[1].startswith(
        "rewards: 16 of 16 failed, above rollout.max_reward_errors=0.2; the first: broken: KeyEr"
    )
    assert existing[0] == "ConfigError"
    assert "already contains a run; add --resume, or choose another name" in existing[1]
    assert failed[2] == existing[2] == ["error_of", "train"]


def test_an_interrupt_stops_the_run_after_a_checkpoint_and_a_second_one_ends_it_at_once(seen):
    stopped = seen["interrupted"]
    assert (stopped.outcome, stopped.steps, stopped.model) == ("stopped", 1, None)
    assert stopped.checkpoint == stopped.folder / "checkpoints/step_000001"
    frames = seen["second interrupt"]
    assert frames and not any(frames), "the frames of the run keep no objects"


def test_the_process_is_left_as_it_was(seen):
    assert seen["replaced"], "a run has handlers of its own"
    left = {"variables": [], "group": False, "handler": True, "excepthook": True, "locks": [], "threads": []}
    assert seen["left"] == left


def test_a_build_that_fails_behind_the_engine_leaves_nothing_open(tmp_path):
    with Ranks(fail_after_the_engine, 1, tiny_model("qwen3_moe"), tmp_path / "program") as process:
        left = process.results(TIMEOUT)[0]
    name, line = left.pop("error")
    assert (name, line.partition(":")[0]) == ("RunError", "weights=shared")
    assert left == {"engine": False, "reward processes": [], "ports": [], "threads": []}


@pytest.fixture(scope="module")
def steered_run(tmp_path_factory):
    with Ranks(steered, 2, tiny_model(), tmp_path_factory.mktemp("steered")) as ranks:
        first, second = ranks.results(TIMEOUT)
    assert first == second
    return first


def test_a_callback_on_rank_0_changes_the_learning_rate_and_ends_the_run_on_all_ranks(steered_run):
    first = steered_run
    assert (first["steps"], first["lr"]) == (2, 1e-5)
    assert 1e-5 not in first["scheduled"]
    checkpoints = first["folder"] / "checkpoints"
    assert [read_record(path)["state"]["learning_rate"] for path in sorted(checkpoints.glob("step_*"))] == [1e-5, 1e-5]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_run_in_the_processes_of_torchrun_equals_the_first(tmp_path, ranks):
    with Ranks(trained_twice, ranks, tiny_model(), tmp_path) as processes:
        for first, second in processes.results(TIMEOUT):
            assert first == second


def test_each_of_several_datasets_is_evaluated_as_a_set(steered_run):
    assert steered_run["evaluated"] == {("eval", "two"), ("eval", "three")}, "and no rows are held out"
    assert steered_run["of_result"] == steered_run["evaluated"]
    rollouts = [row for row in files.read_rollouts(steered_run["folder"]) if row["kind"] == files.EVALUATION]
    assert {row["source"] for row in rollouts} == {"eval/two", "eval/three"}
    assert len({row["prompt_index"] for row in rollouts}) == 2 + 3
