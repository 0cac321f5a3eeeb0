"""The console of a run: phases of the start, a table that fits, one completion of each step, and run.log."""

import io
import logging
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from colocated_grpo.tracking.console import COLUMNS, PROBLEM_COLUMNS, LiveDisplay, PlainDisplay, step_table, step_text
from colocated_grpo.tracking.ending import LogFile, RunOutput
from tests.support.tracked_run import TrackedRun, config_of, groups_of

ROW = {column.key: 1234.5 for column in (*COLUMNS, *PROBLEM_COLUMNS)}


class Shown:
    """A display that records its phases, and announces when one lasts."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lasts = threading.Event()

    def phase_begins(self, name: str) -> None:
        self.calls.append(f"begins {name}")

    def phase_lasts(self, name: str) -> None:
        self.calls.append(f"lasts {name}")
        self.lasts.set()

    def phase_ends(self, name: str, seconds: float) -> None:
        assert seconds >= 0
        self.calls.append(f"ends {name}")


def test_a_phase_of_the_start_is_shown_while_it_lasts_and_when_it_ends() -> None:
    shown = Shown()
    output = RunOutput([shown], patience=0.01)
    with output.phase("reading the weights"):
        assert output.phase_name == "reading the weights"
        assert shown.lasts.wait(60)
    assert shown.calls == ["begins reading the weights", "lasts reading the weights", "ends reading the weights"]
    assert output.phase_name is None


def test_a_start_that_fails_keeps_the_name_of_its_phase() -> None:
    output = RunOutput()
    with pytest.raises(KeyError), output.phase("building the engine"):
        raise KeyError
    assert output.phase_name == "building the engine"
    assert output.start_phase == "start-up (building the engine)"


def test_a_phase_is_one_line_with_its_seconds_on_both_consoles() -> None:
    for kind in (PlainDisplay, LiveDisplay):
        console = Console(file=io.StringIO(), width=60)
        display = kind(console, 10)
        for seconds in (0.01, 12.34):
            display.phase_begins("building the engine")
            display.phase_ends("building the engine", seconds)
        lines = [line for line in console.file.getvalue().splitlines() if line.strip()]
        assert lines == ["building the engine: 12.3 s"]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 120, 160, 200])
def test_the_table_shows_whole_numbers_at_every_width(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(step_table([(7, ROW), (8, {**ROW, "reward": 0.25})], console.width))
    text = console.file.getvalue()
    header = text.splitlines()[1]
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text, "cut"
    assert "step" in header and "reward" in header
    assert ("GiB train" in header) is (width >= 160)


def test_the_least_important_columns_are_dropped_first() -> None:
    kept = [{str(column.header) for column in step_table([(0, ROW)], width).columns} for width in range(20, 200, 5)]
    assert all(narrow <= wide for narrow, wide in pairwise(kept))
    assert kept[-1] == {"step"} | {column.title for column in (*COLUMNS, *PROBLEM_COLUMNS)}


def test_a_step_line_shows_memory_in_use_and_not_what_a_sleeping_engine_has_released() -> None:
    line = step_text({"memory/generate_gib": 135.3, "memory/train_gib": 134.2, "memory/train_torch_gib": 179.5})
    assert line == "135.3 GiB"


def test_one_completion_of_a_step_is_shown_with_its_advantage_and_the_answer(tmp_path: Path) -> None:
    assert "->" not in TrackedRun(tmp_path / "off", config_of(show_completion=False)).train(last_step=1).printed
    printed = TrackedRun(tmp_path / "on").train(last_step=2).printed
    lines = [line for line in printed.splitlines() if " -> " in line]
    shown = "  reward 1.200, advantage 0.500, answer 1 sorted: sort 1 -> step"
    assert lines == [f"{shown} {step} sample 2" for step in range(2)]


def test_a_step_without_signal_says_why_it_has_no_mismatch(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path, config_of(show_completion=False)).train(last_step=0)
    alike = [replace(group, rollouts=group.rollouts[:1] * 4) for group in groups_of(0)]
    for row in ({"reward": 0.0}, {"reward": 0.0, "mismatch/kl": 0.25}):
        run.tracker.flush(0, row, alike)
    equal = "the rewards of each group are equal, so there is nothing to learn from"
    reason = f"  step 0: {equal}, and no mismatch to measure"
    assert run.printed.splitlines().count(reason) == 1


def test_held_out_values_are_shown_with_their_standard_errors() -> None:
    assert "held-out 0.500 +- 0.125" in step_text({"held_out/reward": 0.5, "held_out/reward_stderr": 0.125})


def test_the_log_has_the_text_of_the_whole_start_and_of_every_step(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path)
    run.output.note("note: before the run folder is known")
    run.train(last_step=2)
    logging.getLogger("colocated_grpo.anything").warning("a warning of the package")
    log = (tmp_path / "run.log").read_text()
    assert log.startswith("--- started at ")
    for line in ("note: before the run folder is known\n", "step 1/6  reward 0.100", "WARNING colocated_grpo.anything"):
        assert line in log
    TrackedRun(tmp_path).train(first_step=2, last_step=3)
    assert (tmp_path / "run.log").read_text().startswith(log), "a resumed run appends"
    run.output.close()
    assert not [handler for handler in logging.getLogger("colocated_grpo").handlers if handler.stream is run]


def test_a_log_that_is_closed_receives_no_more_warnings() -> None:
    before = list(logging.getLogger("colocated_grpo").handlers)
    log = LogFile()
    assert logging.getLogger("colocated_grpo").handlers != before
    log.leave_logger()
    assert logging.getLogger("colocated_grpo").handlers == before
