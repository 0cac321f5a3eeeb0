"""Built-in environments and adapters: every name of the tables is found, and nothing is imported before it is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.build import BUILDERS, build_environments
from colocated_grpo.environments.registry import KINDS, find
from colocated_grpo.environments.user_code.loading import construct
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


def test_a_trained_folder_and_an_evaluation_set_of_one_name_are_kept_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eval").mkdir()
    for name, answer in (("eval/own.jsonl", "trained"), ("set.jsonl", "evaluated")):
        (tmp_path / name).write_text(f'{{"prompt": "p", "answer": "{answer}"}}\n' * 2)
    entry = {"type": "dataset", "name": "eval/own.jsonl", "rewards": ["exact_match"], "held_out": 0}
    source = {"name": "set.jsonl", "rewards": ["exact_match"]}
    config = Config.model_validate(
        {
            "model": {"name": "x"},
            "environments": [entry],
            "evaluation": {"sets": [{"name": "own.jsonl", "source": source}]},
        }
    )
    made = build_environments(config, build_char_tokenizer())
    [trained], [held, _] = made.open_source().next(1), made.evaluated(made.sets[0], None, 0)[0]
    assert (trained.source, trained.item["answer"]) == ("eval/own.jsonl#2", "trained")
    assert (held.source, held.item["answer"]) == ("eval/own.jsonl", "evaluated")


def test_an_error_of_a_class_shows_no_secret_arguments():
    def task(api_key: str) -> None:
        raise OSError("no server")

    with pytest.raises(EnvironmentSetupError, match=r"args=\{'api_key': '\*\*\*'\}: OSError: no server"):
        construct(task, {"api_key": "x1"}, "environments 'mine'")
