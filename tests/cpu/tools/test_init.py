"""The tool that writes a config: columns, rewards and sizes that it chooses, and a run of what it writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from colocated_grpo.environments.rewards.builtin import REWARDS
from colocated_grpo.launch import launcher
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.model_sizes import sizes_of
from colocated_grpo.settings.run_sizes import Placement
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.init.__main__ import main
from colocated_grpo.tools.init.choices import (
    Memory,
    batch_of,
    builtin_reward,
    fit_memory,
    learning_rate,
    lengths_of,
    prompt_column,
)
from tests.support.training_runs import ForkedRun, tiny_model

CONVERSATION = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (["So it is #### 72", "#### 1,000"], "gsm8k"),
        (["72", "-1.5"], "gsm8k"),
        ([72, 3], "gsm8k"),
        (["$\\frac{1}{2}$", "3"], "math_verify"),
        (["Paris", "New York"], "exact_match"),
    ],
)
def test_the_reward_is_chosen_by_the_answers(answers, reward):
    rows = [{"question": "?", "solution": answer} for answer in answers]
    chosen = builtin_reward(rows, "question")
    assert (chosen.name, chosen.rename) == (reward, ("solution", "answer"))
    assert reward in REWARDS and chosen.why and chosen.system_prompt


def test_rows_with_calls_are_scored_by_their_calls():
    assert builtin_reward([{"prompt": "?", "tool_calls": [], "answer": "x"}], "prompt").name == "tool_call"


@pytest.mark.parametrize("column", ["prompt", "Question", "messages", "problem", "instruction"])
def test_the_column_of_prompts_is_found_by_its_name(column):
    assert prompt_column([{"id": 1, column: "x", "answer": "y"}]) == column


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"a": "x", "b": "y"}, "no column of prompts with a value in every row (prompt, question, "),
        ({"prompt": "", "answer": "1"}, "no column of prompts with a value in every row (prompt, question, "),
        ({"messages": CONVERSATION}, "'messages' of row 0 ends with the assistant's message; move it into a column"),
        ({"prompt": "x"}, "no column of answers with a value in every row (answer, solution, "),
        ({"prompt": "x", "answer": ""}, "no column of answers with a value in every row (answer, solution, "),
        ({"prompt": "x", "answer": None}, "no column of answers with a value in every row (answer, solution, "),
        (
            {"prompt": "x", "answer": "long " * 50},
            "answers in 'answer' have up to 249 characters, and no built-in reward",
        ),
    ],
)
def test_data_without_usable_columns_is_rejected_with_a_line_that_says_what_to_do(row, line):
    with pytest.raises(ConfigError) as caught:
        builtin_reward([row], prompt_column([row]))
    assert str(caught.value).startswith(f"data: {line}") and "\n" not in str(caught.value)


QWEN = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": False}
SMALL = QWEN | {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
}
MIDDLE = QWEN | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288}
LARGE = QWEN | {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600}
ADAPTER = {"policy": {"lora": {}}, "weights": "shared"}


def memory_of(model: dict, gpus: int, gib: int) -> Memory:
    tree = {"model": {"name": "m"}, "environments": [{"type": "task", "name": "sorting"}]}
    place = Placement(ranks=gpus, on_gpu=True, device_bytes=gib << 30)
    return fit_memory(Config.model_validate(tree), sizes_of(model), model["num_attention_heads"], place, 200 << 30)


@pytest.mark.parametrize(
    ("model", "gpus", "gib", "changes"),
    [
        (SMALL, 1, 24, {}),
        (MIDDLE, 8, 80, {}),
        (MIDDLE, 1, 80, ADAPTER),
        (MIDDLE, 1, 24, {"policy": {"cpu_offload": True}}),
        (LARGE, 8, 80, {"engine": {"tensor_parallel_size": 4}}),
    ],
    ids=["0.6B", "8B on eight", "8B on one", "8B on a small one", "32B on eight"],
)
def test_settings_of_memory_are_those_that_cost_least_among_those_that_fit(model, gpus, gib, changes):
    memory = memory_of(model, gpus, gib)
    assert memory.changes == changes
    assert max(memory.need.training, memory.need.generating) < gib << 30
    assert memory.sequences > 1


@pytest.mark.parametrize(("layers", "hidden", "rate"), [(4, 128, 1e-4), (30, 576, 1e-5), (28, 1024, 1e-6)])
def test_smaller_models_get_higher_learning_rates(layers, hidden, rate):
    model = SMALL | {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 3 * hidden}
    assert learning_rate(sizes_of(model), None).value == rate


def test_a_model_that_does_not_fit_is_rejected_with_what_would():
    with pytest.raises(ConfigError, match="does not fit on 1 GPUs of 24 GiB with any setting; it would with"):
        memory_of(LARGE, 1, 24)


def test_lengths_cover_the_data_within_the_positions_of_the_model():
    assert [length.value for length in lengths_of([10, 70], [300], 4096, on_gpu=False)] == [96, 608]
    prompt, completion = lengths_of([10, 5000], [], 1024, on_gpu=True)
    assert (prompt.value, completion.value) == (512, 512)
    assert "1 are longer than half of the model's 1024 positions and are dropped" in prompt.why


def test_a_batch_needs_no_more_prompts_than_there_are_and_a_prompt_for_each_engine():
    prompts = [batch_of(rows, gpus)[0].value for rows, gpus in ((5000, 1), (5000, 8), (20, 1), (3, 8))]
    assert prompts == [32, 128, 18, 8]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A config for questions with one-digit answers, beside the data. The working folder is another one."""
    folder = tmp_path_factory.mktemp("init")
    rows = [{"question": f"{number}?", "solution": str(number % 3)} for number in range(40)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "questions.yaml"
    data = str(folder / "questions.jsonl")
    assert main([data, "--model", str(tiny_model()), "--gpus", "0", "--output", str(file)]) == 0
    return file


def test_a_config_for_rows_of_which_none_is_held_out_evaluates_none(tmp_path):
    data, file = tmp_path / "few.jsonl", tmp_path / "few.yaml"
    data.write_text('{"question": "1?", "solution": "2"}\n' * 9)
    assert main([str(data), "--model", str(tiny_model()), "--gpus", "0", "--output", str(file)]) == 0
    assert "evaluation:" not in file.read_text()


def test_every_choice_has_a_comment_that_says_why(written):
    text = written.read_text()
    for why in ("40 rows", "which has only numbers", "the longest of 40 prompts", "By arithmetic, the CPU needs"):
        assert why in text
    lines = text.splitlines()
    values = [number for number, line in enumerate(lines) if line.startswith("  ") and line.lstrip()[0] not in "#-"]
    assert len([number for number in values if lines[number - 1].lstrip().startswith("#")]) >= len(values) - 1


def test_the_written_config_passes_a_dry_run(written, capsys):
    assert launcher.main(["--gpus", "0", "--config", str(written), "--dry-run"]) == 0
    assert "note:" not in capsys.readouterr().out


def test_the_written_config_trains(written, tmp_path):
    settings = yaml.safe_load(written.read_text())
    quick = {
        "training_steps": 1,
        "evaluation": {"every": 0},
        "checkpoint": {"final": False},
        "engine": {"enforce_eager": True},
    }
    rollout = settings["rollout"] | {"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 8}
    with ForkedRun(tmp_path, settings | quick | {"rollout": rollout, "run_name": "run"}) as run:
        assert [row["step"] for row in run.finish().rows("train")] == [0]


def test_messages_for_a_model_without_a_chat_template_are_rejected(tmp_path, capsys):
    model, data = shutil.copytree(tiny_model(), tmp_path / "model"), tmp_path / "rows.jsonl"
    (model / "chat_template.jinja").unlink()
    rows = [{"prompt": "1?", "answer": "1"}, {"prompt": CONVERSATION[:1], "answer": "2"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(data), "--model", str(model), "--gpus", "0"]) == 2
    line = f"error: --model={model}: the messages in 'prompt' need a chat template, which this model lacks; write"
    assert capsys.readouterr().err.splitlines()[-1].startswith(line)


def test_a_file_is_never_overwritten(written, capsys):
    before = written.read_text()
    data = str(written.with_suffix(".jsonl"))
    assert main([data, "--model", str(tiny_model()), "--gpus", "0", "--output", str(written)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert written.read_text() == before


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["nope.jsonl", "--gpus", "0"], "error: 'nope.jsonl': no such file"),
        (["rows.txt", "--gpus", "0"], "error: 'rows.txt': must be a file of one of these types: .jsonl, "),
        (["open.csv", "--gpus", "0"], "error: 'open.csv': line 2: unexpected end of data"),
        (["rows.jsonl", "--gpus", "1"], "error: --gpus=1: no GPU is visible here; add --gpu-memory 80 for the machine"),
        (["rows.jsonl", "--gpus", "0", "--reward", "gsm9k"], "error: --reward: unknown reward 'gsm9k'; did you mean"),
        (
            ["rows.jsonl", "--gpus", "0", "--reward", "r.py:f"],
            "error: --reward: cannot import 'r.py'",
        ),
    ],
)
def test_what_is_missing_is_a_line(tmp_path, monkeypatch, capsys, flags, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    Path("rows.jsonl").write_text('{"prompt": "1?", "answer": "1"}\n' * 2)
    Path("open.csv").write_text('prompt,answer\n"1?,1\n')
    assert main([*flags, "--model", "some/model"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(line) and errors.count("\n") == 1
