"""Built-in environments and adapters: every name of the tables is found, and nothing is imported before it is named."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.build import BUILDERS, build_environments
from colocated_grpo.environments.registry import KINDS, find
from colocated_grpo.environments.user_code.loading import construct
from colocated_grpo.settings.base import SAVED
from colocated_grpo.settings.config_file import load_config
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.make_model import build_char_tokenizer

GUESTS = ("adapters", "agents.programs", "rows", "tasks", "town", "turns")
NAMES = [(kind, name) for kind in KINDS for name in (*KINDS[kind].built_in, *KINDS[kind].adapters)]


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_every_name_of_the_tables_is_found(kind, name):
    found, args = find(KINDS[kind], name, {})
    assert callable(found) and args == {}


def test_no_environment_is_imported_before_a_config_names_it():
    script = (
        "import sys, colocated_grpo.environments.build\n"
        f"guests = tuple('colocated_grpo.environments.' + name for name in {GUESTS})\n"
        "print([name for name in sys.modules if name.startswith(guests)])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


def test_every_type_of_source_has_a_builder():
    types = Config.model_json_schema()["properties"]["environments"]["items"]["discriminator"]["mapping"]
    assert {*BUILDERS, "atropos"} == set(types)


def test_a_run_finds_its_files_from_another_folder_and_continues_its_streams(tmp_path, monkeypatch):
    work, run = tmp_path / "work", tmp_path / "run"
    for folder in (work / "data", run):
        folder.mkdir(parents=True)
    (work / "data/rows.jsonl").write_text('{"prompt": "p", "answer": "a"}\n' * 9)
    (work / "rewards.py").write_text("def right(completions, **columns):\n    return [1.0] * len(completions)\n")
    (work / "data/held_out.jsonl").write_text('{"prompt": "q", "answer": "a"}\n')
    entry = {
        "type": "dataset",
        "name": "data/rows.jsonl",
        "eval_split": "data/held_out.jsonl",
        "rewards": ["rewards.py:right", "exact_match"],
    }
    (work / "exact_match").write_text("no reward of this run")
    monkeypatch.chdir(work)
    config = Config.model_validate({"model": {"name": "org/model"}, "environments": [entry]})
    (run / "config.yaml").write_text(json.dumps(config.model_dump(mode="json", context=SAVED)))
    source = build_environments(config, build_char_tokenizer()).open_source()
    source.next(2)

    monkeypatch.chdir(tmp_path)
    again = load_config("run/config.yaml")
    [environment] = again.environments
    assert (again.model.name, environment.name) == ("org/model", str(work / "data/rows.jsonl"))
    assert environment.eval_split == str(work / "data/held_out.jsonl")
    assert [reward.name for reward in environment.rewards] == [f"{work}/rewards.py:right", "exact_match"]
    continued = build_environments(again, build_char_tokenizer()).open_source()
    continued.load_state_dict(source.state_dict())
    assert continued.next(1)[0].source == "rows.jsonl"


def test_programs_are_saved_with_their_folder_and_rows_of_a_program_without(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_dataset").mkdir()
    for name in ("agent.py", "rows.jsonl"):
        (tmp_path / name).touch()
    agent = {"type": "agent", "name": "rows.jsonl", "program": "agent.py:play"}
    rows = {"type": "dataset", "name": "train_dataset", "rewards": ["exact_match"]}
    config = Config.model_validate({"model": {"name": "x"}, "environments": [agent, rows]})
    saved = config.model_dump(mode="json", context=SAVED)["environments"]
    assert saved[0]["program"] == f"{tmp_path}/agent.py:play"
    assert saved[1]["name"] == "train_dataset"


def test_a_trained_dataset_and_an_evaluation_set_of_one_name_are_kept_apart():
    entry = {"type": "dataset", "name": "eval/own", "rewards": ["exact_match"], "held_out": 0}
    evaluated = {"name": "own", "source": {"type": "task", "name": "sorting"}}
    settings = {"model": {"name": "x"}, "environments": [entry], "evaluation": {"sets": [evaluated]}}
    made = build_environments(Config.model_validate(settings), build_char_tokenizer())
    assert [each.name for each in (*made.trained, *made.sets)] == ["eval/own#2", "eval/own"]


def test_an_error_of_a_class_shows_no_secret_arguments():
    def task(api_key: str) -> None:
        raise OSError("no server")

    with pytest.raises(EnvironmentSetupError, match=r"args=\{'api_key': '\*\*\*'\}: OSError: no server"):
        construct(task, {"api_key": "x1"}, "environments 'mine'")
