"""File names in a config: relative to the working folder, or to the folder of the config."""

from __future__ import annotations

from pathlib import Path

import pytest

from colocated_grpo.settings.config_file import load_config
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config

TEXT = """\
model: {name: ./model, chat_template: chat.jinja}
environments:
  - {type: dataset, name: rows.jsonl, eval_split: held_out.jsonl, rewards: ["r.py:right", {name: "r.py:short"}]}
  - {type: task, name: "task.py:Task"}
  - {type: agent, name: tasks.jsonl, program: agent.py}
"""
FILES = ("chat.jinja", "rows.jsonl", "held_out.jsonl", "r.py", "task.py", "tasks.jsonl", "agent.py")


@pytest.fixture
def folders(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """The working folder, and a folder in it with a config."""
    monkeypatch.chdir(tmp_path)
    beside = tmp_path / "configs"
    beside.mkdir()
    (beside / "x.yaml").write_text(TEXT)
    return tmp_path, beside


def put_files_into(folder: Path) -> None:
    (folder / "model").mkdir()
    for name in FILES:
        (folder / name).touch()


def names_in(config: Config) -> list[str]:
    rows, task, agent = config.environments
    return [
        config.model.name,
        config.model.chat_template,
        rows.name,
        rows.eval_split,
        *(reward.name for reward in rows.rewards),
        task.name,
        agent.name,
        agent.program,
    ]


WRITTEN = [
    *("chat.jinja", "rows.jsonl", "held_out.jsonl", "r.py:right", "r.py:short"),
    *("task.py:Task", "tasks.jsonl", "agent.py"),
]


def test_files_are_found_in_the_working_folder(folders):
    put_files_into(folders[0])
    assert names_in(load_config("configs/x.yaml")) == ["./model", *WRITTEN]


def test_files_are_found_beside_the_config(folders, monkeypatch):
    put_files_into(folders[1])
    assert names_in(load_config("configs/x.yaml")) == ["configs/model", *(f"configs/{name}" for name in WRITTEN)]
    monkeypatch.chdir(folders[1])
    assert names_in(load_config("x.yaml")) == ["./model", *WRITTEN]


def test_files_that_are_nowhere_keep_their_names(folders):
    assert names_in(load_config("configs/x.yaml")) == ["./model", *WRITTEN]


def test_two_different_files_of_a_name_are_an_error_that_names_both(folders):
    put_files_into(folders[1])
    (folders[0] / "rows.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        load_config("configs/x.yaml")
    here, beside = folders[0] / "rows.jsonl", folders[1] / "rows.jsonl"
    assert str(caught.value) == (
        f"environments.0.name='rows.jsonl': both {here} and {beside} (beside the config) exist; write the absolute "
        "path of one (line 3 of x.yaml)"
    )


def test_a_link_to_the_same_file_is_no_ambiguity(folders):
    put_files_into(folders[1])
    (folders[0] / "rows.jsonl").symlink_to(folders[1] / "rows.jsonl")
    assert load_config("configs/x.yaml").environments[0].name == "rows.jsonl"


def test_a_name_on_the_command_line_is_relative_to_the_working_folder(folders):
    put_files_into(folders[1])
    (folders[0] / "rows.jsonl").touch()
    config = load_config("configs/x.yaml", ["--environments.0.name", "rows.jsonl"])
    assert config.environments[0].name == "rows.jsonl"
    assert config.environments[0].eval_split == "configs/held_out.jsonl"


def test_a_folder_with_the_name_of_a_task_or_a_split_changes_nothing(folders):
    for name in ("sorting", "test", "gsm8k", "python3"):
        (folders[1] / name).mkdir()
    (folders[1] / "x.yaml").write_text(
        "model: some/model\nenvironments:\n  - {type: task, name: sorting}\n"
        "  - {type: dataset, name: openai/gsm8k, eval_split: test, rewards: [gsm8k]}\n"
        "  - {type: agent, name: openai/gsm8k, program: python3}\n"
    )
    task, rows, agent = load_config("configs/x.yaml").environments
    assert agent.program == "python3"
    assert (task.name, rows.name, rows.eval_split, rows.rewards[0].name) == ("sorting", "openai/gsm8k", "test", "gsm8k")


@pytest.mark.parametrize(
    "entry",
    [
        '{name: own, source: rows.jsonl, rewards: ["r.py:right"], answer: "r.py:short"}',
        '{name: own, source: {type: dataset, name: rows.jsonl, rewards: ["r.py:right"]}, answer: "r.py:short"}',
    ],
    ids=["short", "long"],
)
def test_files_of_evaluation_sets_are_found_beside_the_config(folders, entry):
    put_files_into(folders[1])
    (folders[1] / "x.yaml").write_text(
        f"model: some/model\nenvironments: [{{type: task, name: sorting}}]\nevaluation: {{sets: [{entry}]}}\n"
    )
    [found] = load_config("configs/x.yaml").evaluation.sets
    names = (found.source.name, found.source.rewards[0].name, found.answer)
    assert names == ("configs/rows.jsonl", "configs/r.py:right", "configs/r.py:short")
