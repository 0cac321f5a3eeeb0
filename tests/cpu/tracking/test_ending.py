"""Every end of a run is recorded: in summary.json, at the top of the report, and in run.log."""

import errno
import json
import re
from pathlib import Path

import pytest

from colocated_grpo.errors import CONTINUES, ConfigError, RunError
from colocated_grpo.tracking import files
from colocated_grpo.tracking.ending import (
    RunOutput,
    leave_start,
    leave_with_other_rank,
    place_of,
    record_ending,
    summary_line,
)
from colocated_grpo.tracking.report import write_report
from tests.support.tracked_run import TrackedRun, finished_run


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")


def failed_run(run_dir: Path, error: BaseException) -> TrackedRun:
    """Record three steps, then a failure of rank 2."""
    run = TrackedRun(run_dir).train(last_step=3)
    run.output.folder, run.output.trains = run_dir, True
    run.tracker.abandon()
    assert record_ending(run.output, error, [])[0] == 1
    return run


def raised() -> ZeroDivisionError:
    try:
        return 1 / 0
    except ZeroDivisionError as error:
        return error


def banner(run_dir: Path) -> str:
    found = re.search(r'<div class="failure".*?</div>', (run_dir / "report.html").read_text(), re.DOTALL)
    return found[0] if found else ""


def test_a_defect_is_recorded_with_its_place_step_and_traceback(tmp_path: Path) -> None:
    run = failed_run(tmp_path, raised())
    summary = files.read_summary(tmp_path)
    place = summary.pop("where")
    assert re.fullmatch(r"raised \(test_ending\.py, line \d+\)", place)
    assert {key: summary[key] for key in ("state", "error", "step", "rank", "exit_code", "steps")} == {
        "state": "failed",
        "error": "ZeroDivisionError: division by zero",
        "step": 3,
        "rank": 2,
        "exit_code": 1,
        "steps": 3,
    }
    assert "ZeroDivisionError: division by zero" in banner(tmp_path) and place in banner(tmp_path)
    assert "step 3, rank 2, exit code 1" in banner(tmp_path)
    log = (tmp_path / "run.log").read_text()
    assert "Traceback (most recent call last)" in log and "step 2/6" in log
    assert "failed after 3 steps" in run.printed and "failed after 3 steps" in log


def test_an_error_of_the_run_is_recorded_as_its_line(tmp_path: Path) -> None:
    failed_run(tmp_path, RunError("rewards: 3 of 4 failed <b>"))
    assert files.read_summary(tmp_path)["error"] == "rewards: 3 of 4 failed <b>"
    assert "rewards: 3 of 4 failed &lt;b&gt;" in banner(tmp_path)
    assert (tmp_path / "run.log").read_text().endswith("error: rewards: 3 of 4 failed <b>\n")


def test_a_full_disk_is_one_line_that_names_the_run_folder_and_how_to_continue(tmp_path: Path) -> None:
    output = RunOutput()
    output.folder, output.trains = tmp_path, True
    line = f"error: No space left: while writing into {tmp_path}; {CONTINUES}"
    assert record_ending(output, OSError(errno.ENOSPC, "No space left"), ["runs"]) == (1, [line])


@pytest.mark.parametrize(("trains", "code", "summaries"), [(False, 2, []), (True, 1, ["summary.json"])])
def test_settings_that_fail_are_recorded_once_the_run_trains(tmp_path: Path, trains, code, summaries) -> None:
    output = RunOutput()
    output.folder, output.trains = tmp_path, trains
    assert record_ending(output, ConfigError("prompts() ended"), []) == (code, ["error: prompts() ended"])
    assert [file.name for file in tmp_path.glob("summary.json")] == summaries


def test_the_place_of_an_error_that_explains_another_is_that_of_the_other() -> None:
    cause = raised()
    try:
        raise RunError("out of memory") from cause
    except RunError as error:
        assert place_of(error) == place_of(cause)
        assert place_of(error).startswith("raised (")


def test_a_failure_before_the_first_step_has_a_report_that_names_the_phase(tmp_path: Path) -> None:
    output = RunOutput()
    output.folder = tmp_path / "run"
    with pytest.raises(MemoryError) as caught, output.phase("building the engine"):
        raise MemoryError("no memory left")
    record_ending(output, caught.value, [])
    summary = files.read_summary(output.folder)
    assert summary["step"] is None and summary["steps"] == 0 and summary["rank"] == 2
    assert summary["where"].startswith("start-up (building the engine); test_a_failure_before")
    assert "MemoryError: no memory left" in banner(output.folder)


def test_the_loss_of_a_rank_is_recorded_by_the_rank_that_notices_it(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path).train(last_step=2)
    run.output.folder, run.output.trains = tmp_path, True
    leave_with_other_rank(run.output, "the process of rank 1 ended without an error message")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["state"], summary["error"]) == ("failed", "the process of rank 1 ended without an error message")
    before = (tmp_path / "summary.json").read_bytes()
    leave_with_other_rank(run.output, None)
    assert (tmp_path / "summary.json").read_bytes() == before, "a rank that did not notice first records nothing"


def test_a_start_that_is_stopped_leaves_no_empty_folder(tmp_path: Path) -> None:
    output = RunOutput()
    output.folder = tmp_path / "run"
    output.folder.mkdir()
    (output.folder / ".lock").touch()
    assert leave_start(output) == "stopped during start-up, before the first step"
    assert not output.folder.exists()
    output.trains = True
    assert leave_start(output) == "stopped while the run was ending"


def test_a_run_without_an_end_did_not_end_properly_and_a_running_one_reloads_its_page(tmp_path: Path) -> None:
    TrackedRun(tmp_path).train(last_step=1)
    live = (tmp_path / "report.html").read_text()
    assert 'http-equiv="refresh"' in live and "running, steps done: 1" in live and banner(tmp_path) == ""
    write_report(tmp_path)
    assert "did not end properly" in banner(tmp_path)
    assert "refresh" not in (tmp_path / "report.html").read_text()


def test_a_finished_run_has_no_banner(tmp_path: Path) -> None:
    finished_run(tmp_path)
    assert banner(tmp_path) == ""


def test_a_failure_in_a_folder_that_is_gone_does_not_hide_the_error(tmp_path: Path) -> None:
    output = RunOutput()
    (tmp_path / "file").touch()
    output.folder = tmp_path / "file" / "run"
    record_ending(output, raised(), [])
    assert not output.folder.exists()


def test_the_last_line_names_one_evaluation_once():
    row = {"step": 0, "value": 0.5}
    one = {"state": "stopped", "steps": 1, "held_out_reward": {"before": row, "after": row}}
    assert summary_line(one) == "stopped after 1 step: held-out reward 0.500 (step 0)"
    two = one | {"held_out_reward": {"before": row, "after": {"step": 1, "value": 0.75}}}
    assert summary_line(two) == "stopped after 1 step: held-out reward 0.500 -> 0.750 (steps 0 -> 1)"
