"""The model, data files and modules that a config names: checked before the run, with one error line each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from colocated_grpo.environments.rows.readers import READERS
from colocated_grpo.settings.config_json import longest_sequence
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.inputs import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_inputs
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import DATA_SUFFIXES
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


def input_error(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check_inputs(config)
    return str(caught.value)


def test_an_existing_model_folder_needs_no_network(model):
    config = load("", "--model.name", str(model(max_position_embeddings=4096)))
    assert check_inputs(config) == (config, [])


def test_the_model_of_a_kl_penalty_is_found_supported_and_long_enough_before_the_run(model, tmp_path):
    policy = str(model(max_position_embeddings=4096))
    teacher = tmp_path / "teacher"
    config = load(f"loss: {{kl: {{coef: 1, model: {teacher}}}}}", "--model.name", policy)
    assert input_error(config) == f"loss.kl.model={str(teacher)!r}: no such folder"

    teacher.mkdir()
    (teacher / "model.safetensors").touch()
    (teacher / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert input_error(config).startswith(f"loss.kl.model={str(teacher)!r}: ")

    (teacher / "config.json").write_text(json.dumps({"max_position_embeddings": 1024}))
    assert input_error(config) == (
        f"loss.kl.model={str(teacher)!r}: it has 1024 positions, and a sequence up to 2048; lower "
        "rollout.max_prompt_tokens or rollout.max_completion_tokens"
    )
    (teacher / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    assert check_inputs(config) == (config, [])


@pytest.mark.parametrize(("setting", "value"), [("policy.routing_replay", "true"), ("policy.load_balancing", "0.001")])
def test_settings_of_routers_need_a_mixture_of_experts(model, setting, value):
    config = load("", "--model.name", str(model(model_type="qwen3")), f"--{setting}", value)
    assert input_error(config) == f"{setting}={value}: needs a mixture of experts, not model type 'qwen3'"


def test_the_package_of_the_8_bit_optimizer_is_looked_up_before_the_run(model, monkeypatch):
    config = load("policy: {optimizer: {type: adamw_8bit}}", "--model.name", str(model()))
    assert check_inputs(config) == (config, [])

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)

    assert input_error(config) == (
        "policy.optimizer.type='adamw_8bit': needs bitsandbytes, which is not installed; pip install bitsandbytes"
    )


def test_a_chat_template_is_jinja_text_of_any_length_or_an_existing_file(model, tmp_path):
    folder, file = str(model()), tmp_path / "template.jinja"
    text = "{{ messages }}" * 100
    assert check_inputs(load("", "--model.name", folder, "--model.chat_template", text))[0].model.chat_template == text
    gone = load("", "--model.name", folder, "--model.chat_template", str(file))
    assert input_error(gone) == f"model.chat_template={str(file)!r}: no such file, and not Jinja text (no tag in it)"
    file.write_text(text)
    check_inputs(gone)


@pytest.mark.parametrize("name", ["./nope", "/nope", "a/b/c"])
def test_a_name_with_the_form_of_a_path_must_be_a_folder(name):
    assert input_error(load("", "--model.name", name)) == f"model.name={name!r}: no such folder"


def test_a_folder_without_config_json_is_rejected(tmp_path):
    line = input_error(load("", "--model.name", str(tmp_path)))
    assert line == f"model.name={str(tmp_path)!r}: no config.json in this folder; expected a saved transformers model"


def test_a_folder_without_weights_is_rejected(model):
    folder = model()
    (folder / "model.safetensors").unlink()
    assert "no weights in this folder" in input_error(load("", "--model.name", str(folder)))


@pytest.mark.parametrize("text", ["{", '{"a":' * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"], ids=len)
def test_an_invalid_config_json_is_a_one_line_error(model, text):
    folder = model()
    (folder / "config.json").write_text(text)
    assert "config.json is not valid JSON" in input_error(load("", "--model.name", str(folder)))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"num_attention_heads": 0}, "config.json: num_attention_heads=0: must be a whole number from 1 to 16777216"),
        ({"num_key_value_heads": [4, 0]}, "config.json: num_key_value_heads=0: must be"),
        ({"vocab_size": 2**40}, "config.json: vocab_size=1099511627776: must be"),
        ({"hidden_size": "x"}, "config.json: hidden_size='x': must be"),
        ({"text_config": {"n_layer": -1}}, "text_config in config.json: n_layer=-1: must be"),
        ({"text_config": [1]}, "text_config in config.json: must be an object, not [1]"),
        ({"layer_types": 3}, "config.json: layer_types=3: must be a list"),
        ({"rope_scaling": "x"}, "config.json: rope_scaling='x': must be an object"),
    ],
    ids=str,
)
def test_an_entry_of_config_json_with_an_impossible_value_is_a_one_line_error(model, settings, problem):
    folder = model(**settings)
    line = input_error(load("", "--model.name", str(folder)))
    assert line.startswith(f"model.name={str(folder)!r}: {problem}") and "\n" not in line


def test_an_unreachable_hub_is_a_one_line_error(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("urllib.request.getproxies", dict)
    line = input_error(load("", "--model.name", "nobody/nothing-of-this-name"))
    assert line.startswith(
        "model.name='nobody/nothing-of-this-name': no such folder, not in the local cache, "
        "and the Hub cannot be reached ("
    )
    assert "\n" not in line


def test_the_hub_is_not_contacted_in_offline_mode(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert input_error(load("", "--model.name", "nobody/nothing-of-this-name")) == (
        "model.name='nobody/nothing-of-this-name': no such folder, not in the local cache, and HF_HUB_OFFLINE is set"
    )


def test_an_invalid_hub_name_is_a_one_line_error():
    assert input_error(load("", "--model.name", "a b")) == (
        "model.name='a b': no such folder, and not a valid Hugging Face name"
    )


@pytest.mark.parametrize(
    ("given", "total"),
    [({"max_prompt_tokens": 1024, "max_completion_tokens": 8}, 1032), ({"max_completion_tokens": 1024}, 2048)],
)
def test_given_lengths_beyond_the_models_positions_are_rejected(model, given, total):
    folder = model(n_positions=1024)
    flags = [text for key, value in given.items() for text in (f"--rollout.{key}", str(value))]
    assert input_error(load("", "--model.name", str(folder), *flags)) == (
        f"rollout.max_prompt_tokens + rollout.max_completion_tokens={total}: must be at most 1024, the positions in "
        f"the config.json of {folder}"
    )


@pytest.mark.parametrize(
    ("given", "lowered"),
    [
        ("", "rollout.max_prompt_tokens=512, rollout.max_completion_tokens=512"),
        ("rollout: {max_prompt_tokens: 900}", "rollout.max_completion_tokens=124"),
        ("rollout: {max_completion_tokens: 24}", "rollout.max_prompt_tokens=1000"),
    ],
)
def test_default_lengths_are_lowered_to_the_models_positions_with_a_note(model, given, lowered):
    folder = model(n_positions=1024)
    config, notes = check_inputs(load(given, "--model.name", str(folder)))
    assert config.max_sequence_tokens == 1024
    assert notes == [f"{lowered}: lower than the default, as {folder} has 1024 positions"]


SET_LR = "policy.lr=1e-06 is the default; set 1e-05: models of less than 500 million parameters need this or more"


@pytest.mark.parametrize(
    ("given", "notes"), [("", [SET_LR]), ("policy: {lr: 1.0e-6}", []), ("policy: {lora: {rank: 8}}", [])]
)
def test_a_small_model_at_the_default_rate_is_noted(model, given, notes):
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
    folder = model(model_type="llama", **sizes, **heads)
    assert check_inputs(load(given, "--model.name", str(folder)))[1] == notes


def test_max_model_len_is_reduced_to_the_models_positions_with_a_note(model):
    folder = model(n_positions=2500)
    config, notes = check_inputs(load("engine: {max_model_len: 4096}", "--model.name", str(folder)))
    assert config.engine.max_model_len == 2500
    assert notes == [f"engine.max_model_len=4096: {folder} has 2500 positions; using 2500"]


def test_the_tensor_parallel_size_must_divide_the_attention_heads(model):
    folder = model(num_attention_heads=6)
    line = input_error(load("engine: {tensor_parallel_size: 4}", "--model.name", str(folder)))
    assert line == f"engine.tensor_parallel_size=4: must divide the 6 attention heads of {folder}"


@pytest.mark.parametrize("key", ["policy.train_layers", "policy.lora.layers"])
@pytest.mark.parametrize("settings", [{"num_hidden_layers": 28}, {"n_layer": 28}])
def test_blocks_that_the_model_does_not_have_are_rejected_with_the_valid_range(model, key, settings):
    folder = str(model(**settings))
    line = input_error(load("", "--model.name", folder, f"--{key}", "20-31"))
    assert line == f"{key}=20-31: the model's blocks are 0-27, so there is no block 28 in {folder}"
    check_inputs(load("", "--model.name", folder, f"--{key}", "20-27"))


def test_blocks_are_not_checked_in_a_model_that_does_not_state_their_number(model):
    config, notes = check_inputs(load("policy: {train_layers: 20-31}", "--model.name", str(model())))
    assert config.policy.train_layers == list(range(20, 32))
    assert notes == []


ADAPTER = {"adapter_config.json", ADAPTER_WEIGHTS}


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (None, "no such folder; write default or the folder of a PEFT adapter (download one of the Hub first)"),
        (set(), "no adapter_config.json in this folder; expected an adapter saved by PEFT"),
        ({ADAPTER_WEIGHTS}, "no adapter_config.json in this folder; expected an adapter saved by PEFT"),
        ({"adapter_config.json"}, f"no {ADAPTER_WEIGHTS} in this folder; expected an adapter saved by PEFT"),
        (
            {"adapter_config.json", "adapter_model.bin"},
            f"reading adapter_model.bin can run code; load it in PEFT and save it as {ADAPTER_WEIGHTS}",
        ),
    ],
)
def test_an_adapter_to_continue_from_must_be_a_folder_written_by_peft(model, tmp_path, names, problem):
    folder = tmp_path / "adapter"
    if names is not None:
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    config = load("", "--model.name", str(model()), "--policy.lora.init", str(folder))
    assert input_error(config) == f"policy.lora.init={str(folder)!r}: {problem}"


def test_a_complete_adapter_and_a_new_one_are_accepted(model, tmp_path):
    folder = str(model())
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}')
    for name in (ADAPTER_WEIGHTS, "adapter_model.bin"):
        (tmp_path / name).touch()
    for init, rank in ((str(tmp_path), 4), ("default", 32)):
        config, _ = check_inputs(load("", "--model.name", folder, "--policy.lora.init", init))
        assert config.policy.lora.rank == rank


def test_the_adapter_files_checked_are_those_that_are_read():
    assert {ADAPTER_WEIGHTS, ADAPTER_CONFIG} == ADAPTER


GEMMA3 = {"model_type": "gemma3_text"}


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({}, None),
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default"}}, 2048),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 16384),
        (GEMMA3 | {"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 2048),
    ],
)
def test_the_longest_sequence_includes_rope_scaling(settings, positions):
    assert longest_sequence(settings) == positions


@pytest.mark.parametrize("place", ["top level", "rope_scaling"])
def test_sequences_beyond_the_shorter_table_of_longrope_are_rejected(model, place):
    """Beyond, transformers chooses the table for each batch and vLLM once, so log-probabilities would differ."""
    limit = {"original_max_position_embeddings": 1024}
    rope = {"rope_type": "longrope", **(limit if place == "rope_scaling" else {})}
    folder = model(max_position_embeddings=8192, rope_scaling=rope, **(limit if place == "top level" else {}))
    assert input_error(load("", "--model.name", str(folder))) == (
        "rollout.max_prompt_tokens + rollout.max_completion_tokens=2048: must be at most 1024, as transformers and "
        f"vLLM apply the longrope scaling of {folder} to different tokens"
    )


def test_a_model_that_does_not_train_is_rejected(model):
    folder = str(model(model_type="dbrx", num_local_experts=8))
    assert input_error(load("", "--model.name", folder)).startswith(
        f"model.name={folder!r}: model type 'dbrx' does not train because it has a mixture of experts"
    )


@pytest.mark.parametrize("name", ["nope.jsonl", "NOPE.CSV"])
def test_a_missing_data_file_is_a_one_line_error(name):
    text = f"model: {{name: a}}\nenvironments: [{{type: dataset, name: {name}, rewards: [gsm8k]}}]"
    assert input_error(load(text, alone=True)).startswith(f"environments.0.name={name!r}: no such file (in ")


def test_the_suffixes_checked_are_those_with_a_reader():
    assert set(DATA_SUFFIXES) == set(READERS)


def test_a_data_file_of_an_unknown_format_is_rejected_without_the_hub(tmp_path):
    file = tmp_path / "rows.tsv"
    file.touch()
    text = f"model: {{name: a}}\nenvironments: [{{type: dataset, name: {file}, rewards: [gsm8k]}}]"
    assert input_error(load(text, alone=True)) == (
        f"environments.0.name={str(file)!r}: unsupported format; supported: .jsonl, .json, .csv, .parquet"
    )


def test_a_leading_tilde_is_expanded_in_every_file_name(model, tmp_path, monkeypatch):
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
    ("entry", "key"),
    [
        ("{type: task, name: 'gone.py:Mine'}", "environments.0.name"),
        ("{type: episode, name: 'gone.py:Mine'}", "environments.0.name"),
        ("{type: turns, name: 'gone.py:Mine'}", "environments.0.name"),
        ("{type: dataset, name: rows.jsonl, rewards: [gsm8k, 'gone.py:Mine']}", "environments.0.rewards.1"),
    ],
)
def test_a_missing_file_of_user_code_is_reported_with_its_key(tmp_path, monkeypatch, entry, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    error = input_error(load(f"model: a\nenvironments: [{entry}]", alone=True))
    assert error == f"{key}='gone.py:Mine': no such file"


@pytest.mark.parametrize("name", ["openenv:http://localhost:8000", "openenv:http://127.0.0.1"])
def test_names_of_library_environments_are_not_checked_as_modules(model, name):
    line = f"environments: [{{type: episode, name: '{name}'}}]\nmodel: {{name: {model()}}}"
    config, _ = check_inputs(load(line, alone=True))
    assert config.environments[0].name == name
