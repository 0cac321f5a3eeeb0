"""Local files and Hugging Face datasets as sources of prompts."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest
from datasets import Dataset, DatasetDict

from colocated_grpo.assembly.data import draw_evaluated
from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.build import build_environments
from colocated_grpo.environments.prompts import strip_nulls
from colocated_grpo.environments.rows import dataset
from colocated_grpo.settings.evaluation import EvaluationConfig
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.make_model import build_char_tokenizer

ROWS = [{"question": f"{number}+1=", "answer": str(number + 1), "level": "easy"} for number in range(10)]


def write(path, rows=ROWS):
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def environments(path, *, seed=0, max_prompt_tokens=1024, **fields):
    entry = {"type": "dataset", "name": str(path), "rewards": ["exact_match"], "held_out": 3} | fields
    config = Config(
        model={"name": "none"},
        environments=[{"prompt_column": "question"} | entry],
        rollout={"max_prompt_tokens": max_prompt_tokens},
        seed=seed,
    )
    return build_environments(config, build_char_tokenizer())


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_file_format_yields_the_same_items(tmp_path, suffix):
    made = environments(write(tmp_path / f"rows{suffix}"), shuffle=False)
    prompts = made.open_source().next(7)
    expected = [{"answer": row["answer"], "level": "easy", "prompt": row["question"]} for row in ROWS[:7]]
    assert [prompt.item for prompt in prompts] == expected
    assert [prompt.item["prompt"] for prompt in made.held_out(64)] == ["7+1=", "8+1=", "9+1="]


@pytest.mark.parametrize(("rows", "held_out"), [(5, 0), (10, 1), (99, 9), (640, 64), (2000, 64)])
def test_a_tenth_of_the_rows_is_held_out_by_default(tmp_path, rows, held_out):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}?", "answer": "1"}) + "\n" for i in range(rows)))
    made = environments(path, held_out=None)
    assert len(made.held_out(1000)) == held_out


@pytest.mark.parametrize(
    ("rows", "fields", "every", "noted"),
    [
        (9, {}, 10, True),
        (10, {}, 10, False),
        (9, {"held_out": 1}, 10, False),
        (9, {"held_out": 0}, 10, False),
        (9, {}, 0, False),
    ],
)
def test_a_note_says_if_too_few_rows_leave_none_held_out(tmp_path, rows, fields, every, noted):
    path = write(tmp_path / "rows.jsonl", ROWS[:rows])
    lines = []
    draw_evaluated(EvaluationConfig(every=every), environments(path, **{"held_out": None} | fields), lines.append)
    line = f"environments '{path.name}': none of 9 rows is held out for evaluation; set held_out or eval_split"
    assert lines == [line] * noted


def test_local_files_need_neither_datasets_nor_torch(file):
    script = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from colocated_grpo.settings.schema import Config\n"
        "from colocated_grpo.environments.build import build_environments\n"
        "tokenizer = SimpleNamespace(chat_template=None, all_special_tokens=[], bos_token=None,\n"
        "    encode=lambda text, add_special_tokens: [1] * len(text), get_vocab=lambda: dict(a=1))\n"
        f"entry = dict(type='dataset', name={str(file)!r}, rewards=['exact_match'], held_out=2)\n"
        "entry['prompt_column'] = 'question'\n"
        "build_environments(Config(model=dict(name='x'), environments=[entry]), tokenizer).open_source().next(3)\n"
        "sys.exit(bool({'datasets', 'torch', 'transformers', 'trl'} & sys.modules.keys()))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_each_epoch_contains_every_training_row_once_in_its_own_order(file):
    prompts = [prompt.item["prompt"] for prompt in environments(file).open_source().next(28)]
    epochs = [prompts[start : start + 7] for start in range(0, 28, 7)]
    assert all(sorted(epoch) == [row["question"] for row in ROWS[:7]] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert prompts == [prompt.item["prompt"] for prompt in environments(file).open_source().next(28)]
    assert prompts != [prompt.item["prompt"] for prompt in environments(file, seed=1).open_source().next(28)]


def test_columns_are_renamed_before_rewards_see_them(file):
    [prompt] = environments(file, columns={"answer": "solution"}, rewards=["math_verify"]).open_source().next(1)
    assert prompt.item.keys() == {"prompt", "solution", "level"}


def test_a_system_prompt_makes_chat_messages_and_keeps_the_system_message_of_a_row(tmp_path, file):
    [prompt] = environments(file, shuffle=False, system_prompt="Be brief.").open_source().next(1)
    assert prompt.item["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "0+1="},
    ]
    assert prompt.text == "<|system|>Be brief.<|end|><|user|>0+1=<|end|><|assistant|>"
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}]
    rows = write(tmp_path / "chat.jsonl", [{"question": own, "answer": "x"}] * 4)
    [prompt] = environments(rows, system_prompt="Be brief.").open_source().next(1)
    assert prompt.item["prompt"] == own


def test_null_fields_that_parquet_adds_to_messages_do_not_reach_the_template(tmp_path):
    rows = [
        {"question": [{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b", "name": "x"}]}
    ]
    path = write(tmp_path / "chat.parquet", rows * 4)
    [prompt] = environments(path, rewards=["format_think"]).open_source().next(1)
    assert prompt.item["prompt"][0] == {"role": "user", "content": "a"}
    calls = [{"id": None, "function": {"name": "f", "arguments": {"x": 1, "y": None}}}]
    assert strip_nulls(calls) == [{"function": {"name": "f", "arguments": {"x": 1}}}]


def test_eval_split_of_a_file_is_another_file(tmp_path, file):
    other = write(tmp_path / "test.json", [{"question": "new?", "answer": "y"}])
    made = environments(file, eval_split=str(other))
    assert [prompt.item["prompt"] for prompt in made.held_out(8)] == ["new?"]
    assert len({prompt.item["prompt"] for prompt in made.open_source().next(10)}) == 10


def test_a_hugging_face_dataset_is_read_by_subset_and_split(tmp_path):
    (tmp_path / "main").mkdir()
    write(tmp_path / "main" / "train.jsonl")
    write(tmp_path / "main" / "test.jsonl", ROWS[:2])
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n"
        "  - split: test\n    path: main/test.jsonl\n---\n"
    )
    made = environments(tmp_path, subset="main", eval_split="test", shuffle=False)
    assert [prompt.item["prompt"] for prompt in made.open_source().next(10)] == [row["question"] for row in ROWS]
    assert len(made.held_out(8)) == 2
    tail = environments(tmp_path, subset="main", shuffle=False)
    assert [prompt.item["prompt"] for prompt in tail.held_out(8)] == ["7+1=", "8+1=", "9+1="]
    with pytest.raises(EnvironmentSetupError, match="cannot load split 'nothing'"):
        environments(tmp_path, subset="main", split="nothing").open_source()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_column": "prompt"}, "prompt_column: no column 'prompt'; the data has: question, answer, level"),
        ({"columns": {"reply": "answer"}}, "columns: no column 'reply'; the data has: question, answer, level"),
        ({"columns": {"answer": "gold"}}, "'exact_match' needs the column 'answer'; available: gold, level"),
        ({"held_out": 10}, "held_out=10: no training row is left of 10"),
        ({"subset": "main"}, "subset='main' does not apply to a local file"),
        ({"eval_split": "test"}, "eval_split='test': `name` is a file, so this must be one too: .jsonl"),
        ({"eval_split": "test.jsonl"}, "cannot read 'test.jsonl': no such file"),
        ({"split": "test"}, "split='test' does not apply to a local file"),
    ],
)
def test_settings_that_do_not_match_the_data_raise_one_line(file, fields, message):
    with pytest.raises(EnvironmentSetupError) as error:
        environments(file, **fields).open_source()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", '{"question": "a"}\n{"question": \n', "line 2, column 15: Expecting value"),
        ("x.jsonl", '["question"]\n', "line 1: a row must be an object"),
        ("x.jsonl", '{"question": "a"}\n{"answer": 1, "b": 2, "answer": 3}\n', "line 2: key 'answer' occurs twice"),
        ("x.json", '[{"question": "a", "meta": {"b": 1, "b": 1}}]', "key 'b' occurs twice"),
        ("x.csv", "question,answer,answer\na,1,2\n", "line 2: key 'answer' occurs twice"),
        ("x.jsonl", "\n", "no rows (split 'train')"),
        ("x.jsonl", '{"question": 7, "answer": "a"}\n' * 9, "row 0': a prompt must be text or a list of messages"),
        ("x.json", '{"rows": []}', "must hold a list of objects, this one holds a dict"),
        ("x.json", "[", "cannot read"),
        ("x.json", '{"question": "a", "answer": "1"}\n{"question"\n', "line 2, column 13: Expecting ':' delimiter"),
        (
            "x.jsonl",
            '{"question": ' + "[" * 100_000 + "]" * 100_000 + "}",
            "line 1: maximum recursion depth",
        ),
        ("x.json", "[" * 100_000 + "]" * 100_000, "maximum recursion depth"),
        ("x.parquet", "nothing", "cannot read"),
    ],
)
def test_an_unreadable_file_raises_one_line(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(EnvironmentSetupError) as error:
        environments(path).open_source()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "x"}, "rows.jsonl row 8': no column 'question'; it has: answer"),
        (
            {"question": "x", "level": "easy"},
            "rows.jsonl row 8': reward 'exact_match' needs the column 'answer'; available: level",
        ),
        ({"question": None}, "rows.jsonl row 8': a prompt must be text or a list of messages with a role, got None"),
        (
            {"question": [{"role": "user"}]},
            "rows.jsonl row 8': a message of the prompt has no 'content': {'role': 'user'}",
        ),
        (
            {"question": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}]},
            "rows.jsonl row 8': the content of a message must be text or parts with text, because models are trained",
        ),
        (
            {"question": [{"role": "user", "content": []}]},
            "rows.jsonl row 8': the content of a message must be text or parts",
        ),
    ],
)
def test_a_malformed_row_is_named_before_training_starts(tmp_path, file, row, message):
    path = write(tmp_path / "wrong" / "rows.jsonl", [*ROWS[:8], row, *ROWS[9:]])
    with pytest.raises(EnvironmentSetupError) as error:
        environments(path).open_source()
    assert message in str(error.value)
    with pytest.raises(EnvironmentSetupError) as error:
        environments(file, eval_split=str(path)).open_source()
    assert f"wrong/{message}" in str(error.value)


def test_a_json_file_may_hold_one_row_per_line(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    prompts = environments(path, shuffle=False).open_source().next(7)
    assert [prompt.item["prompt"] for prompt in prompts] == [row["question"] for row in ROWS[:7]]


def test_a_dataset_saved_to_disk_is_read_with_its_splits(tmp_path):
    rows = Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    DatasetDict(train=rows, test=Dataset.from_list(ROWS[:2])).save_to_disk(tmp_path / "two")
    [first, *_] = environments(tmp_path / "one", shuffle=False).open_source().next(7)
    assert first.item["prompt"] == "0+1="
    made = environments(tmp_path / "two", shuffle=False, eval_split="test")
    assert [prompt.item["prompt"] for prompt in made.held_out(8)] == ["0+1=", "1+1="]
    with pytest.raises(EnvironmentSetupError, match="cannot load split 'nothing': KeyError"):
        environments(tmp_path / "two", split="nothing").open_source()
    with pytest.raises(EnvironmentSetupError, match="cannot load split 'test': ValueError: the folder holds a dataset"):
        environments(tmp_path / "one", eval_split="test").open_source()


@pytest.mark.parametrize("null", [0, 3, 7])
def test_a_hugging_face_row_with_a_null_prompt_is_named_before_training_starts(tmp_path, monkeypatch, null):
    monkeypatch.setattr(dataset, "ROWS_AT_A_TIME", 4)
    rows = [{**row, "question": None} if number == null else row for number, row in enumerate(ROWS)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(EnvironmentSetupError, match=rf"row {null}\b.*(is null|got None)"):
        environments(tmp_path).open_source()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("b,2,hard,x", "more cells than the header's 3"),
        ("b,2", "fewer cells than the header's 3"),
        ('"b"!,2,hard', "',' expected after '\"'"),
    ],
)
def test_a_csv_row_that_cannot_be_read_is_named_with_its_line(tmp_path, line, problem):
    path = tmp_path / "rows.csv"
    path.write_text(f"question,answer,level\na,1,easy\n{line}\nc,3,easy\n")
    with pytest.raises(EnvironmentSetupError, match=f"line 3: {problem}"):
        environments(path, held_out=0).open_source()


def test_empty_lines_of_a_csv_file_are_skipped(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("question,answer\n\na,1\n\n\nb,2\n")
    prompts = environments(path, held_out=0, shuffle=False).open_source().next(2)
    assert [prompt.item for prompt in prompts] == [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]


def test_a_resume_with_another_number_of_rows_is_rejected(tmp_path, file):
    state = environments(file).open_source().state_dict()
    shorter = environments(write(tmp_path / "short.jsonl", ROWS[:8])).open_source()
    state["streams"] = {"short.jsonl": state["streams"][file.name]}
    state["counts"] = {"short.jsonl": 0}
    with pytest.raises(EnvironmentSetupError, match="saved with 7 training rows and there are 5 now"):
        shorter.load_state_dict(state)


@pytest.mark.parametrize("place", [0, 3, -4])
def test_a_resume_with_changed_rows_is_rejected(tmp_path, place):
    path = write(tmp_path / "rows.jsonl", ROWS)
    state = environments(path).open_source().state_dict()
    changed = [dict(row) for row in ROWS]
    changed[place]["answer"] = "another"
    other = environments(write(path, changed)).open_source()
    with pytest.raises(EnvironmentSetupError, match="the 7 training rows differ from those of the checkpoint"):
        other.load_state_dict(state)
