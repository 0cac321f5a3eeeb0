"""The launcher at the begin and end of a run: nodes, the first stop signal, and failures that no rank could record."""

import json
import signal
from pathlib import Path

import pytest

from colocated_grpo.launch.elastic import waiting_line
from colocated_grpo.launch.ending import STARTING, UNFINISHED, ending, stop_action
from colocated_grpo.runtime.processes import SAVING


@pytest.fixture
def verdict(tmp_path: Path) -> Path:
    """The launcher's file, with a run folder beside it that a rank has named."""
    (tmp_path / "run").mkdir()
    (tmp_path / "verdict.folder").write_text(str(tmp_path / "run"))
    return tmp_path / "verdict"


def summary(verdict: Path) -> dict:
    file = verdict.parent / "run/summary.json"
    return json.loads(file.read_text()) if file.exists() else {}


def test_ranks_that_were_all_killed_are_recorded_with_the_exit_code(verdict):
    verdict.with_suffix(".training").touch()
    assert ending(1, verdict) == (1, "")
    assert summary(verdict)["state"] == "failed"
    assert summary(verdict)["error"].startswith("the processes ended with exit code 1 and no error message")
    for name in ("report.html", "run.log"):
        assert "ended with exit code 1 and no error message" in (verdict.parent / "run" / name).read_text()


def test_a_verdict_that_no_rank_recorded_is_recorded_with_its_line(verdict):
    verdict.write_text("1\nerror: judge (r.py, line 7) holds Python's interpreter lock")
    assert ending(137, verdict) == (1, "error: judge (r.py, line 7) holds Python's interpreter lock")
    assert summary(verdict)["error"] == "judge (r.py, line 7) holds Python's interpreter lock"
    assert summary(verdict)["where"] == "start-up"


def test_a_failure_that_a_rank_has_recorded_is_left_as_it_is(verdict):
    verdict.with_suffix(".recorded").touch()
    verdict.write_text("1\nerror: known")
    assert ending(1, verdict) == (1, "error: known")
    assert summary(verdict) == {}


def test_an_end_without_an_exit_code_is_a_failure(verdict):
    assert ending(0, verdict) == (1, f"error: {UNFINISHED}")
    assert summary(verdict)["exit_code"] == 1


@pytest.mark.parametrize("code", [0, 130])
def test_runs_that_finished_or_were_stopped_are_not_failures(verdict, code):
    verdict.with_suffix(".finished").touch()
    assert ending(code, verdict) == (code, "")
    assert summary(verdict) == {}


@pytest.mark.parametrize(("code", "shown"), [(0, 143), (130, 130)])
def test_a_run_that_another_node_has_stopped_does_not_look_finished(verdict, code, shown):
    for suffix in (".finished", ".stopped"):
        verdict.with_suffix(suffix).touch()
    assert ending(code, verdict) == (shown, "")


def test_a_run_that_was_killed_by_a_second_signal_says_so(verdict):
    verdict.with_suffix(".training").touch()
    assert ending(130, verdict) == (130, "")
    assert summary(verdict)["state"] == "killed"
    assert summary(verdict)["error"].startswith("killed on request")


def test_a_stop_during_the_start_is_one_line_and_leaves_nothing(verdict):
    message, limit = stop_action(verdict).begin(signal.SIGINT)
    assert message == STARTING and limit is not None
    assert ending(130, verdict) == (130, "")
    assert summary(verdict) == {}


def test_a_run_that_trains_is_asked_to_save(verdict):
    verdict.with_suffix(".training").touch()
    assert stop_action(verdict).begin(signal.SIGTERM) == (SAVING, None)
    assert not verdict.exists()


@pytest.mark.parametrize(
    ("nodes", "rank", "line"),
    [
        (2, 0, "waiting for node 1 of 2"),
        (4, 0, "waiting for nodes 1 to 3 of 4"),
        (4, 2, "waiting for node 0 of 4 at 10.0.0.1"),
    ],
)
def test_a_node_says_which_nodes_it_waits_for(nodes, rank, line):
    assert waiting_line(nodes, rank, "10.0.0.1") == line
