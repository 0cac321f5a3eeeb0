"""Rows are left out by conditions on columns and by a function; the log says how many and which."""

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
from tests.support.config_text import config_error, load
from tests.support.templates import CODE
from tests.support.training_runs import tiny_model

ROWS = [
    {"prompt": "q" * number, "level": number % 4, "subject": "ab"[number % 2], "easy": number < 4}
    for number in range(1, 13)
]

CPU = Placement(ranks=1, on_gpu=False, device_bytes=0)


@pytest.fixture
def code(tmp_path):
    path = tmp_path / "my_data.py"
    path.write_text(CODE)
    return path


@pytest.fixture(params=["jsonl", "csv", "hub"])
def data(request, tmp_path):
    """Return the name of the same rows as a file of text, a file of numbers and a Hugging Face dataset."""
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


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ({"level": 2}, [2, 6, 10]),
        ({"level": [1, 3], "subject": "b"}, [1, 3, 5, 7, 9, 11]),
        ({"level": {"min": 2}}, [2, 3, 6, 7, 10, 11]),
        ({"level": {"min": 1, "max": 2.5}, "subject": ["a", "c"]}, [2, 6, 10]),
        ({"easy": True, "level": {"min": 2}}, [2, 3]),
        ({"easy": [False], "level": 2}, [6, 10]),
    ],
)
def test_rows_that_do_not_meet_every_condition_are_left_out(data, where, kept):
    assert lengths(environments(entry(data, where=where)), 2 * len(kept)) == kept * 2


def test_a_function_sees_the_rows_that_meet_the_conditions(data, code):
    assert lengths(environments(entry(data, where={"level": [1, 2]}, filter=f"{code}:short")), 3) == [1, 2, 5]


def test_true_is_not_one(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "q" * (n + 1), "kept": v}) + "\n" for n, v in enumerate([1, True])))
    assert lengths(environments(entry(path, where={"kept": True})), 1) == [2]
    assert lengths(environments(entry(path, where={"kept": 1})), 1) == [1]


def test_bad_rows_may_be_left_out_and_others_keep_their_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "level": 1}\n{"prompt": null, "level": null}\n{"prompt": "b", "level": 1}\n')
    made = environments(entry(path, where={"level": 1}))
    assert [prompt.item["prompt"] for prompt in made.open_source().next(2)] == ["a", "b"]
    path.write_text('{"prompt": "a", "level": 1}\n{"prompt": "x", "level": 2}\n{"prompt": null, "level": 1}\n')
    with pytest.raises(EnvironmentSetupError, match=r"rows\.jsonl row 2': a prompt must be text"):
        environments(entry(path, where={"level": 1})).open_source()
    Dataset.from_json(str(path)).save_to_disk(tmp_path / "saved")
    with pytest.raises(EnvironmentSetupError, match=r"row 2 of 'train': column 'prompt' is null"):
        environments(entry(tmp_path / "saved", where={"level": 1})).open_source()


def test_held_out_rows_are_filtered_too_and_the_log_counts_and_names_what_is_left_out(data, code):
    made = environments(entry(data, held_out=2, where={"level": [1, 2]}, filter=f"{code}:short"))
    lines: list[str] = []
    open_source(made, lines.append)
    assert [len(prompt.item["prompt"]) for prompt in made.held_out(9)] == [2, 5]
    assert lines == [
        f"environments '{data}': 'train': 3 of 12 rows are kept; left out: 6 by where.level (rows 2, 3, 6, ...), "
        f"3 by filter {code}:short (rows 5, 8, 9)"
    ]
    everything = environments(entry(data, where={"level": {"min": 0}}))
    open_source(everything, lines.append)
    assert len(lines) == 1, "nothing is said where nothing is left out"


def test_the_dry_run_shows_the_counts_and_evaluation_sets_are_filtered(data):
    model, notes = str(tiny_model()), []
    preview(Config(model={"name": model}, environments=[entry(data, where={"level": 2})]), CPU, notes.append)
    assert "3 of 12 rows are kept" in notes[0]
    source = {"type": "dataset", "name": str(data), "rewards": ["format_think"], "where": {"level": 2}}
    sets = {"sets": [{"name": "own", "source": source}]}
    config = Config(model={"name": "none"}, environments=[entry(data)], evaluation=sets)
    made = build_environments(config, build_char_tokenizer())
    prompts, _ = made.evaluated(made.sets[0], None, 0)
    assert [len(prompt.item["prompt"]) for prompt in prompts] == [2, 6, 10]
    assert "3 of 12 rows are kept" in made.sets[0].items.filter_notes[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"where": {"levle": 1}}, "where: no column 'levle'; the data has: prompt, level, subject, easy"),
        (
            {"where": {"level": 9}},
            "'train': 0 of 12 rows are kept; left out: 12 by where.level (rows 0, 1, 2, ...); the",
        ),
        ({"where": {"subject": {"max": 1}}}, "row 0: column 'subject' is 'b', not a number, and where sets bounds"),
        ({"filter": "CODE:fails"}, "row 0: KeyError: 'missing' (my_data.py, line "),
        ({"filter": "CODE:leaves"}, "row 0: SystemExit: 4 (my_data.py, line "),
        ({"filter": "CODE:forgets"}, "row 0: returned None, not true or false"),
        ({"filter": "gone.py:keep"}, "filter: cannot import 'gone.py': FileNotFoundError: no such file"),
    ],
)
def test_conditions_that_do_not_fit_the_data_raise_one_line(data, code, settings, message):
    if "filter" in settings:
        settings = {"filter": settings["filter"].replace("CODE", str(code))}
    with pytest.raises(EnvironmentSetupError) as error:
        environments(entry(data, **settings)).open_source()
    assert message in str(error.value)
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


def test_a_condition_is_values_or_bounds():
    text = (
        "environments: [{type: dataset, name: a.jsonl, rewards: [exact_match], where: {level: %s}}]\nmodel: {name: x}"
    )
    [source] = load(text % "{min: 1}", alone=True).environments
    assert (source.where["level"].min, source.where["level"].max) == (1, None)
    for wrong, message in (
        ("{}", "needs either values or a min, a max or both"),
        ("{any: [1], max: 2}", "needs either values or a min, a max or both"),
        ("{min: 2, max: 1}", "min=2 is above max=1"),
        ("{at_least: 2}", "environments.0.where.level.at_least: unknown key"),
        ("[]", "environments.0.where.level=[]: needs at least 1 entry"),
    ):
        assert message in config_error(text % wrong, alone=True)
