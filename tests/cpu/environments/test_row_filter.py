"""Rows are left out by a function; the log says how many and which."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

from colocated_grpo.assembly.data import open_source
from colocated_grpo.assembly.preview import preview
from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.build import build_environments
from colocated_grpo.settings.inputs import check_inputs
from colocated_grpo.settings.run_sizes import Placement
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.make_model import build_char_tokenizer
from tests.support.templates import CODE
from tests.support.training_runs import tiny_model

ROWS = [{"prompt": "q" * number, "level": number % 4} for number in range(1, 13)]

CPU = Placement(ranks=1, on_gpu=False, device_bytes=0)


@pytest.fixture
def code(tmp_path):
    path = tmp_path / "my_data.py"
    path.write_text(CODE)
    return path


@pytest.fixture(params=["jsonl", "csv", "hub"])
def data(request, tmp_path):
    """Return the name of the same rows as a file of numbers, a file of text and a Hugging Face dataset."""
    if request.param == "hub":
        Dataset.from_list(ROWS).save_to_disk(tmp_path / "rows")
        return tmp_path / "rows"
    path = tmp_path / f"rows.{request.param}"
    if request.param == "csv":
        lines = [",".join(ROWS[0]), *(",".join(map(str, row.values())) for row in ROWS)]
    else:
        lines = [json.dumps(row) for row in ROWS]
    path.write_text("\n".join(lines) + "\n")
    return path


def entry(name, **settings):
    read = {"name": str(name), "rewards": ["format_think"], "held_out": 0, "shuffle": False}
    return {"type": "dataset", **read, **settings}


def environments(*entries):
    return build_environments(Config(model={"name": "none"}, environments=list(entries)), build_char_tokenizer())


def lengths(made, count):
    return [len(prompt.item["prompt"]) for prompt in made.open_source().next(count)]


def test_rows_for_which_the_function_returns_false_are_left_out(data, code):
    assert lengths(environments(entry(data, filter=f"{code}:graded")), 12) == [1, 2, 5, 6, 9, 10] * 2
    assert lengths(environments(entry(data, filter=f"{code}:graded_and_short")), 3) == [1, 2, 5]


def test_bad_rows_may_be_left_out_and_others_keep_their_numbers(tmp_path, code):
    by_level = {"filter": f"{code}:graded"}
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "level": 1}\n{"prompt": null, "level": null}\n{"prompt": "b", "level": 1}\n')
    made = environments(entry(path, **by_level))
    assert [prompt.item["prompt"] for prompt in made.open_source().next(2)] == ["a", "b"]
    path.write_text('{"prompt": "a", "level": 1}\n{"prompt": "x", "level": 3}\n{"prompt": null, "level": 1}\n')
    with pytest.raises(EnvironmentSetupError, match=r"rows\.jsonl row 2': a prompt must be text"):
        environments(entry(path, **by_level)).open_source()
    Dataset.from_json(str(path)).save_to_disk(tmp_path / "saved")
    with pytest.raises(EnvironmentSetupError, match=r"row 2 of 'train': column 'prompt' is null"):
        environments(entry(tmp_path / "saved", **by_level)).open_source()


def test_held_out_rows_are_filtered_too_and_the_log_counts_and_names_what_is_left_out(data, code):
    made = environments(entry(data, held_out=2, filter=f"{code}:graded_and_short"))
    lines: list[str] = []
    open_source(made, lines.append)
    assert [len(prompt.item["prompt"]) for prompt in made.held_out(9)] == [2, 5]
    assert lines == [
        f"environments '{data.name}': 'train': 3 of 12 rows are kept; left out: "
        f"9 by filter {code}:graded_and_short (rows 2, 3, 5, ...)"
    ]
    everything = environments(entry(data, filter=f"{code}:all_rows"))
    open_source(everything, lines.append)
    assert len(lines) == 1, "nothing is said where nothing is left out"


def test_the_dry_run_shows_the_counts_and_evaluation_sets_are_filtered(data, code):
    model, notes, short = str(tiny_model()), [], {"filter": f"{code}:short"}
    preview(Config(model={"name": model}, environments=[entry(data, **short)]), CPU, notes.append)
    assert "5 of 12 rows are kept" in notes[0]
    source = {"type": "dataset", "name": str(data), "rewards": ["format_think"], **short}
    sets = {"sets": [{"name": "own", "source": source}]}
    config = Config(model={"name": "none"}, environments=[entry(data)], evaluation=sets)
    made = build_environments(config, build_char_tokenizer())
    prompts, _ = made.evaluated(made.sets[0], None, 0)
    assert [len(prompt.item["prompt"]) for prompt in prompts] == [1, 2, 3, 4, 5]
    assert "5 of 12 rows are kept" in made.sets[0].items.filter_notes[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CODE:no_rows", "0 of 12 rows are kept; left out: 12 by filter CODE:no_rows (rows 0, 1, 2, ...); the first"),
        ("CODE:fails", "'train': filter CODE:fails: row 0: KeyError: 'missing' (my_data.py, line "),
        ("CODE:leaves", "row 0: SystemExit: 4 (my_data.py, line "),
        ("CODE:forgets", "row 0: returned None, not true or false"),
        ("CODE:says_no", "row 0: returned 'no', not true or false"),
        ("CODE:is_unclear", "row 0: ValueError: ambiguous (my_data.py, line "),
        ("gone.py:keep", "filter: cannot import 'gone.py': FileNotFoundError: no such file"),
    ],
)
def test_functions_that_do_not_fit_the_data_raise_one_line(data, code, name, message):
    with pytest.raises(EnvironmentSetupError) as error:
        environments(entry(data, filter=name.replace("CODE", str(code)))).open_source()
    assert message.replace("CODE", str(code)) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named_before_anything_starts(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 3)
    settings = {"filter": "gone.py:keep", "tools": [{"name": "x"}, "gone.py:clock"]}
    config = Config(model={"name": str(tiny_model())}, environments=[entry(tmp_path / "rows.jsonl", **settings)])
    with pytest.raises(ValueError) as error:
        check_inputs(config)
    assert str(error.value).splitlines() == [
        "environments.0.tools.1='gone.py:clock': no such file",
        "environments.0.filter='gone.py:keep': no such file",
    ]
