"""Trackers besides W&B and TensorBoard: accelerate's classes take our arguments, and none of them can end a run."""

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.inputs import check_inputs
from colocated_grpo.settings.schema import TrackerName
from colocated_grpo.tracking.sinks import (
    LONGEST_TEXT,
    WRITERS,
    Sink,
    Sinks,
    Table,
    completions_table,
    make_tracker,
    valid_name,
)
from tests.support.tracked_run import TrackedRun, config_of, groups_of, rollout_of

NAMES = get_args(TrackerName)


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_has_a_tracker_of_every_name_that_takes_project_and_run(name: str, tmp_path: Path) -> None:
    tracker = make_tracker(name, "my-project", tmp_path / "my-run")
    assert tracker.name == name
    assert "my-project" in str(vars(tracker))


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_one_line_before_the_run_starts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as error:
        check_inputs(config_of(trackers=[name]))
    line = f"tracking.trackers={name!r}: this package is not installed; pip install {name.replace('_', '-')}"
    assert line in str(error.value).splitlines()


def test_a_tracker_that_does_not_start_is_disabled_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    run = TrackedRun(tmp_path / "run", config_of(trackers=["mlflow", "mlflow"])).train().finish()
    notes = [line for line in run.printed.splitlines() if "tracking.trackers" in line]
    assert len(notes) == 1 and notes[0].startswith("tracking.trackers: mlflow disabled: ")
    assert (tmp_path / "run" / "report.html").is_file()


ASKS_FOR_A_KEY = """
def init(**arguments):
    input("your key: ")
"""


def test_a_tracker_that_asks_for_a_key_is_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swanlab.py").write_text(ASKS_FOR_A_KEY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "swanlab", raising=False)
    reading, writing = os.pipe()  # a terminal at which nothing is typed: reading from it would block
    with open(reading) as terminal, open(writing, "w"):
        monkeypatch.setattr(sys, "stdin", terminal)
        run = TrackedRun(tmp_path / "run", config_of(trackers=["swanlab"])).train().finish()
        assert sys.stdin is terminal
    assert "tracking.trackers: swanlab disabled: EOF when reading a line" in run.printed


def test_mlflow_has_the_settings_and_every_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which the small package, mlflow-skinny, needs
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    run = TrackedRun(tmp_path / "run", config_of(trackers=["mlflow"], project="mine")).train(last_step=3).finish()
    assert "disabled" not in run.printed
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert found.info.run_name == "run" and found.data.params["model.name"] == "tiny"
    assert [point.step for point in client.get_metric_history(found.info.run_id, "my_own/metric")] == [0, 1, 2]


def test_names_of_metrics_are_valid_in_every_tracker() -> None:
    assert [valid_name(name) for name in ("eval/aime/pass@8", "seconds/step")] == ["eval/aime/pass_8", "seconds/step"]


class Recording:
    """The parts of a tracker of accelerate that tables are sent to."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.tracker = SimpleNamespace(info=SimpleNamespace(run_id="7"), log_table=self._add)

    def log(self, values: dict, step: int) -> None:
        self._add(values, step=step)

    def log_table(self, name: str, **table: object) -> None:
        self._add(name, **table)

    def _add(self, *values: object, **named: object) -> None:
        self.sent.append((*values, named))


TABLE = Table(columns=["step", "reward"], rows=[[5, 0.5], [5, None]])
PACKAGES = {
    "trackio": SimpleNamespace(Table=lambda dataframe: list(dataframe.columns)),
    "swanlab": SimpleNamespace(echarts=SimpleNamespace(Table=lambda: SimpleNamespace(add=lambda *table: table))),
}
"""Packages that are not installed here, as far as a table needs them."""
SENT = {
    "trackio": ({"completions": ["step", "reward"]}, {"step": 5}),
    "swanlab": ({"completions": (["step", "reward"], [[5, 0.5], [5, ""]])}, {"step": 5}),
    "mlflow": ({"step": [5, 5], "reward": [0.5, None]}, "completions.json", {"run_id": "7"}),
    "clearml": ("completions", {"columns": ["step", "reward"], "data": TABLE.rows, "step": 5}),
    "comet_ml": ("completions_000005.csv", {"tabular_data": TABLE.rows, "headers": ["step", "reward"]}),
}


@pytest.mark.parametrize("name", SENT)
def test_a_table_is_sent_in_the_form_of_each_tracker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Recording()
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(log_table=tracker._add))
    for package, module in PACKAGES.items():
        monkeypatch.setitem(sys.modules, package, module)
    WRITERS[name](tracker, 5, TABLE)
    assert tracker.sent == [SENT[name]]
    assert set(SENT) | {"wandb"} == set(WRITERS)


def test_a_table_that_fails_is_disabled_and_metrics_are_still_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, rows = [], []
    sinks = Sinks(lines.append)
    failing = Sink(log=lambda step, row: rows.append(step), table=lambda step, table: 1 / 0, finish=lambda: None)
    monkeypatch.setattr("colocated_grpo.tracking.sinks._started", lambda *arguments: failing)
    sinks.open({}, config_of(trackers=["mlflow"], completions_every=2).tracking, Path("run"), 0)
    for step in range(4):
        sinks.log(step, {})
        sinks.completions(step, groups_of(step))
    assert lines == ["tracking.trackers: mlflow: tables of completions disabled: division by zero"]
    assert rows == [0, 1, 2, 3]


def test_texts_of_a_table_are_bounded_and_can_be_sent() -> None:
    long = rollout_of(math.nan, "a" * 50_000 + "\ud800")
    group = replace(groups_of(0)[0], rollouts=[long, rollout_of(1.0, "short")])
    table = completions_table(3, [group], 16)
    first, second = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert len(first["completion"]) <= LONGEST_TEXT and "[...]" in first["completion"]
    assert first["completion"].endswith("a?") and first["reward"] is None
    assert (second["completion"], second["reward"], second["step"]) == ("short", 1.0, 3)
