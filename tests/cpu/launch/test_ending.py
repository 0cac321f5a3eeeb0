"""The launcher at the begin and end of a run: nodes, the first stop signal, and failures that no rank could record."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from colocated_grpo.launch.launcher import SAVING, STARTING, begin_stop
from colocated_grpo.runtime import processes
from colocated_grpo.runtime.run_folder import LOCK_FILE
from colocated_grpo.runtime.verdict import ProcessEnd, read_verdicts, write_verdict
from colocated_grpo.tracking.ending import UNFINISHED, ending


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The launcher's folder, with a run folder in it."""
    (tmp_path / "run").mkdir()
    (tmp_path / processes.LOCK_FILE).touch()
    return tmp_path


def leave(folder: Path, rank: int = 0, **changes: object) -> None:
    """Write the verdict of a rank that has named the run folder."""
    assert write_verdict(folder / f"rank_{rank}.json", ProcessEnd(rank=rank, folder=str(folder / "run"), **changes))


def ended(folder: Path, code: int, rank: int = 0) -> tuple[int, list[str]]:
    return ending(code, read_verdicts(folder), rank)


def summary(folder: Path) -> dict:
    file = folder / "run/summary.json"
    return json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.parametrize("exit_code", [3, 255])
def test_an_exit_that_no_rank_explains_is_shown_and_recorded_with_its_code(folder, exit_code):
    leave(folder, training=True)
    code, [line] = ended(folder, exit_code)
    assert code == exit_code
    assert line.startswith(f"error: the processes ended with exit code {exit_code} and no error message: ")
    assert summary(folder)["state"] == "failed"
    assert summary(folder)["error"] == line.removeprefix("error: ")
    for name in ("report.html", "run.log"):
        assert f"ended with exit code {exit_code} and no error message" in (folder / "run" / name).read_text()


def test_a_rank_that_was_killed_is_named_with_its_signal(folder):
    leave(folder, training=True)
    leave(folder, rank=1, training=True)
    leave(folder, rank=2, training=True, recorded=True, code=1, lines=["error: rank 1 is gone"], reported=3.0)
    code, [line] = ended(folder, 128 + signal.SIGKILL, rank=1)
    assert (code, summary(folder)["exit_code"], summary(folder)["state"]) == (1, 1, "failed")
    assert line.startswith("error: the run was ended from outside, rank 1 by SIGKILL: ")
    assert (summary(folder)["error"], summary(folder)["rank"]) == (line.removeprefix("error: "), 1)


def test_a_rank_that_a_stop_signal_ended_before_it_could_handle_one_is_named(folder):
    code, [line] = ended(folder, 128 + signal.SIGTERM, rank=1)
    assert code == 1
    assert "ended from outside, rank 1 by SIGTERM" in line


def test_an_exit_code_above_those_of_signals_is_explained_by_the_other_ranks(folder):
    leave(folder, training=True)
    leave(folder, rank=1, training=True, code=1, lines=["error: rank 0 is gone"], reported=3.0)
    assert ended(folder, 255) == (1, ["error: rank 0 is gone"]), "as after os._exit(-1)"


def test_a_report_that_no_rank_recorded_is_recorded_with_its_line(folder):
    leave(folder, code=1, lines=["error: the disk is full"], reported=2.0)
    leave(folder, rank=1, code=1, lines=["error: rank 0 is gone"], reported=3.0)
    assert ended(folder, 137) == (1, ["error: the disk is full"])
    assert summary(folder)["error"] == "the disk is full"
    assert summary(folder)["where"] == "start-up"


def test_a_failure_that_a_rank_has_recorded_is_left_as_it_is(folder):
    leave(folder, recorded=True, code=1, lines=["error: known"])
    assert ended(folder, 1) == (1, ["error: known"])
    assert summary(folder) == {}


def test_an_end_without_an_exit_code_is_a_failure(folder):
    leave(folder)
    assert ended(folder, 0) == (1, [f"error: {UNFINISHED}"])
    assert summary(folder)["exit_code"] == 1


@pytest.mark.parametrize(("code", "shown"), [(0, 0), (130, 0), (1, 1)])
def test_a_finished_run_is_no_failure_even_after_a_late_stop_signal(folder, code, shown):
    leave(folder, finished=True)
    assert ended(folder, code) == (shown, [])
    assert summary(folder) == {}


@pytest.mark.parametrize(("code", "shown"), [(0, 143), (130, 130)])
def test_a_run_that_another_node_has_stopped_does_not_look_finished(folder, code, shown):
    leave(folder, finished=True, stopped=True)
    assert ended(folder, code) == (shown, [])


def test_a_run_that_was_killed_by_a_second_signal_says_so(folder):
    leave(folder, training=True)
    assert ended(folder, 130) == (130, [])
    assert summary(folder)["state"] == "killed"
    assert summary(folder)["error"].startswith("killed on request")


def test_a_stop_during_the_start_is_one_line_and_leaves_nothing(folder):
    leave(folder)
    (folder / "run" / LOCK_FILE).touch()
    message, limit = begin_stop(folder, signal.SIGINT)
    assert message == STARTING and limit is not None
    assert ended(folder, 130) == (130, [])
    assert not (folder / "run").exists(), "removed for a rank that was blocked and killed"


def test_a_run_that_trains_is_asked_to_save(folder):
    leave(folder, training=True)
    assert begin_stop(folder, signal.SIGTERM) == (SAVING, None)
    assert [verdict.code for verdict in read_verdicts(folder)] == [None]


@pytest.mark.parametrize("name", ["emptied", "emptied/removed"])
def test_a_run_whose_folder_was_cleaned_while_it_trained_is_asked_to_save(tmp_path, name):
    (tmp_path / "emptied").mkdir()
    assert begin_stop(tmp_path / name, signal.SIGTERM) == (SAVING, None)


def test_ctrl_c_ends_a_program_without_a_launcher_with_one_line() -> None:
    interrupted = "run_program(lambda: signal.raise_signal(signal.SIGINT))"
    code = f"import signal; from colocated_grpo.runtime.verdict import run_program; {interrupted}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "\nstopped\n")
