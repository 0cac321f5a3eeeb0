"""The guide to Trainer: its programs run, and its tables name what exists."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from colocated_grpo import Result, RunState, Trainer
from colocated_grpo.callbacks import EVENTS
from colocated_grpo.tracking import files
from tests.support.paths import ROOT
from tests.support.programs import without_launcher
from tests.support.ranks import Ranks
from tests.support.training_runs import tiny_model

GUIDE = (ROOT / "docs/guides/python.md").read_text()
SCRIPT, ENVIRONMENTS, RESUME, CALLBACKS, PORTED = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
SMALL = {
    '"Qwen/Qwen3-0.6B"': repr(str(tiny_model())),
    "training_steps=100": "training_steps=2, callbacks=[Patience()]",
    '"prompts_per_step": 32, "max_completion_tokens": 64': '"prompts_per_step": 2, "max_completion_tokens": 8',
}


def replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def run_program(text: str, folder: Path) -> Any:
    """Run a program in `folder`, as Python runs a script, and return its `result`."""
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    with without_launcher():
        exec(compile(text, "train.py", "exec"), names)
    return names["result"]


def names_after(text: str, **given: Any) -> dict[str, Any]:
    names = {"__name__": "__main__", "Trainer": Trainer, **given}
    exec(compile(text, "guide.py", "exec"), names)
    return names


def cells_of(section: str, column: int = 0) -> list[str]:
    """Return the names in one column of the tables of a section."""
    body = GUIDE.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in body.splitlines() if line.startswith("| ")]
    return [name for row in rows for name in re.findall(r"`([\w.]+)(?:\(.*?\))?`", row[column])]


def test_the_script_and_its_callback_train(tmp_path):
    with Ranks(run_program, 1, CALLBACKS + replaced(SCRIPT, SMALL), tmp_path) as process:
        result = process.results(300.0)[0]
    assert (result.outcome, result.steps) == ("finished", 2)
    rows = [row for row in files.read_metrics(result.folder) if row["kind"] == files.TRAIN]
    assert [row["distance"] for row in rows] == [1 - row["reward"] for row in rows]
    assert "callback_errors" not in rows[0]


def test_entries_of_environments_with_objects_are_read(tmp_path, monkeypatch):
    class MyTask:
        def prompts(self, seed, split): ...
        def score(self, item, completion): ...

    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("model: some/model\n")
    program = names_after(SCRIPT.split("result =")[0])
    trainer = names_after("trainer = " + ENVIRONMENTS, MyTask=MyTask, **program)["trainer"]
    task, rows = trainer.config.environments
    assert isinstance(task.given, MyTask)
    assert rows.given is not None and [reward.name for reward in rows.rewards][1] == "format_think"


def test_the_line_that_resumes_is_possible():
    names = names_after(SCRIPT.split("result =")[0])
    assert names_after(replaced(RESUME, {'.train(resume="auto")': ""}), **names)["result"].config.training_steps == 100
    assert "resume" in inspect.signature(Trainer.train).parameters


def test_the_script_of_trl_is_read():
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": "1 + 1", "solution": "2"}] * 20)
    changes = {
        "from datasets import load_dataset\n": "",
        "trainer.train()\n": "",
        "GRPOConfig(learning": "GRPOConfig(use_cpu=True, bf16=False, learning",
    }
    names = names_after(replaced(PORTED, changes), load_dataset=lambda name, split: rows)
    config = names["trainer"].config
    assert (config.policy.lr, config.rollout.group_size, config.rollout.prompts_per_step) == (2e-6, 8, 8)
    assert config.training_steps == 7, "three passes over 18 of 20 rows, 8 a step"
    assert config.environments[0].given is rows
    assert config.environments[0].rewards[0].given is names["accuracy_reward"]


def test_the_tables_name_what_exists():
    parameters = set(inspect.signature(Trainer.__init__).parameters) - {"self", "settings"}
    assert set(cells_of("Arguments")) == parameters
    assert set(cells_of("What train() returns")) == {field.name for field in fields(Result)}
    methods = [name for name in cells_of("Callbacks") if name in EVENTS]
    assert methods == list(EVENTS)
    members = set(dir(RunState)) | set(inspect.signature(RunState.__init__).parameters)
    assert set(cells_of("Callbacks")) - set(EVENTS) - {"state"} <= members
