"""The model, data files and modules that a config names: what is told when they are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colocated_grpo.config.errors import ConfigError
from colocated_grpo.config.inputs import DATA_SUFFIXES, check_inputs, longest_sequence
from colocated_grpo.config.schema import Config
from colocated_grpo.environments.dataset import READERS
from tests.support.config_text import load


@pytest.fixture
def model(tmp_path):
    """A model folder with the given config.json."""

    def model(**settings: object) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(settings))
        (folder / "model.safetensors").touch()
        return folder

    return model


def input_complaint(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check_inputs(config)
    return str(caught.value)


def test_a_model_folder_that_exists_needs_no_network(model):
    config = load("", "--model.name", str(model(max_position_embeddings=4096)))
    assert check_inputs(config) == (config, [])


def test_a_chat_template_is_jinja_text_of_any_length_or_an_existing_file(model, tmp_path):
    folder, file = str(model()), tmp_path / "template.jinja"
    text = "{{ messages }}" * 100
    assert check_inputs(load("", "--model.name", folder, "--model.chat_template", text))[0].model.chat_template == text
    gone = load("", "--model.name", folder, "--model.chat_template", str(file))
    assert input_complaint(gone) == f"model.chat_template={str(file)!r}: no such file, and no Jinja text"
    file.write_text(text)
    check_inputs(gone)


@pytest.mark.parametrize("name", ["./nope", "/nope", "a/b/c"])
def test_a_name_that_can_only_be_a_folder_must_be_one(name):
    assert input_complaint(load("", "--model.name", name)) == f"model.name={name!r}: no such folder"


def test_a_folder_without_config_json_is_no_model(tmp_path):
    line = input_complaint(load("", "--model.name", str(tmp_path)))
    assert line == f"model.name={str(tmp_path)!r}: this folder has no config.json, so it is no saved model"


def test_a_folder_without_weights_is_no_model(model):
    folder = model()
    (folder / "model.safetensors").unlink()
    assert "this folder has no weights" in input_complaint(load("", "--model.name", str(folder)))


def test_a_broken_config_json_is_told_in_one_line(model):
    folder = model()
    (folder / "config.json").write_text("{")
    assert "config.json is not valid JSON" in input_complaint(load("", "--model.name", str(folder)))


def test_an_unreachable_hub_is_told_in_one_line(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("urllib.request.getproxies", dict)
    line = input_complaint(load("", "--model.name", "nobody/nothing-of-this-name"))
    assert line.startswith(
        "model.name='nobody/nothing-of-this-name': no such folder, not in the local cache, "
        "and the Hub cannot be reached ("
    )
    assert "\n" not in line


def test_an_offline_hub_is_not_asked(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert input_complaint(load("", "--model.name", "nobody/nothing-of-this-name")) == (
        "model.name='nobody/nothing-of-this-name': no such folder, not in the local cache, "
        "and HF_HUB_OFFLINE forbids the Hub"
    )


def test_a_name_that_the_hub_does_not_allow_is_told_in_one_line():
    assert input_complaint(load("", "--model.name", "a b")) == (
        "model.name='a b': no such folder, and no valid Hugging Face name"
    )


def test_a_sequence_longer_than_the_model_reads_is_refused(model):
    folder = model(n_positions=1024)
    assert input_complaint(load("", "--model.name", str(folder))) == (
        f"rollout.max_prompt_tokens + rollout.max_completion_tokens=2048 is longer than {folder} reads: "
        "its config.json allows 1024 positions"
    )


def test_an_engine_longer_than_the_model_is_cut_to_it_with_a_note(model):
    folder = model(n_positions=2500)
    config, notes = check_inputs(load("engine: {max_model_len: 4096}", "--model.name", str(folder)))
    assert config.engine.max_model_len == 2500
    assert notes == [f"engine.max_model_len=4096: {folder} has 2500 positions; using 2500"]


def test_attention_heads_must_divide_over_an_engine(model):
    folder = model(num_attention_heads=6)
    line = input_complaint(load("engine: {tensor_parallel_size: 4}", "--model.name", str(folder)))
    assert line == f"engine.tensor_parallel_size=4 does not divide the 6 attention heads of {folder}"


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({}, None),
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default"}}, 2048),
    ],
)
def test_the_longest_sequence_includes_rope_scaling(settings, positions):
    assert longest_sequence(settings) == positions


@pytest.mark.parametrize("name", ["nope.jsonl", "NOPE.CSV"])
def test_a_data_file_that_does_not_exist_is_told_in_one_line(name):
    text = f"model: {{name: a}}\nenvironments: [{{type: dataset, name: {name}, rewards: [gsm8k]}}]"
    assert input_complaint(load(text, alone=True)).startswith(f"environments.0.name={name!r}: no such file (in ")


def test_the_launcher_knows_every_format_that_is_read():
    assert set(DATA_SUFFIXES) == set(READERS)


def test_a_data_file_of_an_unknown_format_is_not_looked_for_on_the_hub(tmp_path):
    file = tmp_path / "rows.tsv"
    file.touch()
    text = f"model: {{name: a}}\nenvironments: [{{type: dataset, name: {file}, rewards: [gsm8k]}}]"
    assert input_complaint(load(text, alone=True)) == (
        f"environments.0.name={str(file)!r}: no format that is read; there are .jsonl, .json, .csv, .parquet"
    )


def test_a_leading_tilde_is_the_users_home_wherever_a_file_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model()
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "template.jinja").write_text("messages")
    text = (
        "model: {name: ~/model, chat_template: ~/template.jinja}\noutput_dir: ~/runs\n"
        "environments: [{type: dataset, name: ~/rows.jsonl, rewards: [gsm8k]}]"
    )
    config, _ = check_inputs(load(text, alone=True))
    assert config.output_dir == str(tmp_path / "runs")
    assert config.environments[0].name == str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("my_package.rewards.right", "write my_package.rewards:right"),
        ("my_rewards.py", "name its function too, file.py:function"),
    ],
)
def test_a_reward_without_a_colon_is_told_how_it_is_written(tmp_path, name, rule):
    (tmp_path / "rows.jsonl").touch()
    source = f"{{type: dataset, name: {tmp_path / 'rows.jsonl'}, rewards: [{name}]}}"
    complaint = input_complaint(load(f"model: a\nenvironments: [{source}]", alone=True))
    assert complaint == f"environments.0.rewards.0={name!r}: {rule}"


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ("{type: task, name: 'mine.py:Gone'}", "environments.0.name"),
        ("{type: episode, name: 'mine.py:Gone'}", "environments.0.name"),
        ("{type: turns, name: 'mine.py:Gone'}", "environments.0.name"),
        ("{type: dataset, name: rows.jsonl, rewards: [gsm8k, 'mine.py:Gone']}", "environments.0.rewards.1"),
    ],
)
def test_a_name_that_the_users_file_lacks_is_told_with_its_key(tmp_path, monkeypatch, entry, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "mine.py").write_text("Here = 1")
    complaint = input_complaint(load(f"model: a\nenvironments: [{entry}]", alone=True))
    assert complaint == f"{key}='mine.py:Gone': mine.py defines no 'Gone'; it defines: Here"


@pytest.mark.parametrize("name", ["openenv:http://localhost:8000", "openenv:http://127.0.0.1", "verifiers:my-taskset"])
def test_what_names_an_environment_of_a_library_is_no_module_of_the_users(model, name):
    line = f"environments: [{{type: episode, name: '{name}'}}]\nmodel: {{name: {model()}}}"
    config, _ = check_inputs(load(line, alone=True))
    assert config.environments[0].name == name
