"""A dry run shows the first prompts and rewards, and finds what would fail after weights or an engine are loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from safetensors.torch import load_file, save_file

from colocated_grpo import Trainer
from colocated_grpo.assembly.preview import preview
from colocated_grpo.launch.rank import missing_space
from colocated_grpo.settings.config_json import read_config_json
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.generation import ModelConfig
from colocated_grpo.settings.run_sizes import Placement
from colocated_grpo.settings.schema import Config
from tests.support.real_models import real_model
from tests.support.reward_models import make_reward_model
from tests.support.small_policy import config_of, make_small_model, policy_of
from tests.support.training_runs import tiny_model

REWARDS = """
import time

def of_texts(completions, answer, **columns):
    return [1 / (1 + len(text)) if right in text else 0.0 for text, right in zip(completions, answer)]

def of_both(completions, answer, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return of_texts(texts, answer)

def applies_nowhere(completions, **columns):
    return [None] * len(completions)

def reads_a_number(text):
    return float(text["value"])

def raises(completions, **columns):
    return [reads_a_number(text) for text in completions]

def hangs(completions, **columns):
    time.sleep(3600)
"""
CPU = Placement(ranks=1, on_gpu=False, device_bytes=0)


def rows(folder: Path, prompt: object = "What is 17 plus 25?") -> Path:
    """Write rows in the folder, with a module of reward functions."""
    (folder / "my_rewards.py").write_text(REWARDS)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": "42"}) + "\n" for _ in range(4)))
    return file


def shown(folder: Path, reward: str = "of_both", **settings: object) -> tuple[list[str], list[str]]:
    """Return the lines of a preview, and its notes."""
    environment = {
        "type": "dataset",
        "name": str(folder / "rows.jsonl"),
        "rewards": [f"{folder}/my_rewards.py:{reward}"],
        **settings.pop("entry", {}),
    }
    trainer = Trainer(str(settings.pop("model", None) or tiny_model()), environments=[environment], **settings)
    notes: list[str] = []
    return preview(trainer.config, CPU, notes.append), notes


def test_rows_without_a_usable_prompt_are_counted(tmp_path):
    with rows(tmp_path).open("a") as file:
        file.write(json.dumps({"prompt": "", "answer": "42"}) + "\n")
    notes = shown(tmp_path, rollout={"prompts_per_step": 8}, entry={"held_out": 0})[1]
    assert [note for note in notes if re.match(r"\d of the first \d+ prompts are left out: empty, or longer", note)]


def test_empty_answers_are_counted(tmp_path):
    with rows(tmp_path).open("a") as file:
        file.write(json.dumps({"prompt": "What is 1 plus 1?", "answer": ""}) + "\n")
    notes = shown(tmp_path, rollout={"prompts_per_step": 5}, entry={"held_out": 0})[1]
    assert "1 of the first 5 prompts have an empty answer" in notes


def test_the_first_prompt_its_length_and_two_rewards_are_shown(tmp_path):
    rows(tmp_path)
    lines, notes = shown(tmp_path)
    text = "\n".join(lines)
    assert re.search(r"rows\.jsonl: 32 prompts of the first step have (\d+) to \1 tokens", text)
    assert re.search(r"the first prompt, \d+ tokens:\n    \| .*What is 17 plus 25\?", text)
    assert "the reward is 0.3333 for '42', 0 for 'I do not know.'" in text
    assert not [note for note in notes if "no more reward" in note]


def test_a_reward_that_reads_texts_is_noticed_on_chat_messages(tmp_path):
    rows(tmp_path, [{"role": "user", "content": "What is 17 plus 25?"}])
    model = real_model("smollm2")
    lines, notes = shown(tmp_path, "of_texts", model=model)
    assert any("the reward is 0 for '42', 0 for" in line for line in lines)
    assert any("Completions of these prompts are lists of messages" in note for note in notes)
    assert not [note for note in shown(tmp_path, "of_both", model=model)[1] if "no more reward" in note]


def test_control_characters_of_a_prompt_do_not_reach_the_terminal(tmp_path):
    rows(tmp_path, "\x1b[2J What is 17 plus 25?")
    text = "\n".join(shown(tmp_path, model=real_model("smollm2"))[0])
    assert "\\x1b[2J What is 17 plus 25?" in text and "\x1b" not in text


def test_memory_and_disk_space_are_shown_and_a_lack_of_them_is_noticed(tmp_path, monkeypatch):
    rows(tmp_path)
    lines, notes = shown(tmp_path)
    needs = (
        r"a rank needs at least \S+ GiB while training and \S+ GiB while generating; checkpoints and exports take \S+"
    )
    assert re.search(needs, lines[-2])
    assert not [note for note in notes if "output_dir" in note or "a rank needs" in note]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1 << 20))
    monkeypatch.setattr(os, "access", lambda folder, mode: mode == os.R_OK)
    memory, folder, disk = shown(tmp_path)[1][-3:]
    assert folder.endswith(" is not a writable folder here")
    assert re.search("a rank needs at least .* generating, and has 0.000977 GiB here; use a smaller model", memory)
    assert disk.startswith("output_dir='runs': checkpoints and exports take")


def test_a_run_notes_a_lack_of_disk_space_at_its_start(world, monkeypatch):
    config = Config(model={"name": str(tiny_model())}, environments=[{"type": "task", "name": "sorting"}])
    assert not [*missing_space(config, world)]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 10))
    [line] = missing_space(config, world)
    assert line.startswith("output_dir='runs': checkpoints and exports take")


def test_rewards_that_are_all_none_are_noticed(tmp_path):
    rows(tmp_path)
    assert any("no reward for '42'; return a number" in note for note in shown(tmp_path, "applies_nowhere")[1])


def test_a_template_without_the_messages_is_noticed(tmp_path):
    messages = [{"prompt": [{"role": "user", "content": f"Question {index}"}], "answer": "1"} for index in range(4)]
    rows(tmp_path).write_text("".join(json.dumps(row) + "\n" for row in messages))
    model = tmp_path / "model"
    model.mkdir()
    for file in real_model("smollm2").iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").write_text("constant")
    assert any("rendered as the same text" in note for note in shown(tmp_path, model=model)[1])


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        ("raises", r"raises: TypeError: .* \(my_rewards\.py, line 15\)"),
        ("hangs", r"no reward within rollout\.reward_timeout=1 s, in hangs \(my_rewards\.py, line 21\)"),
    ],
)
def test_a_reward_that_fails_for_every_text_is_an_error_with_function_and_line(tmp_path, reward, cause):
    rows(tmp_path)
    with pytest.raises(ConfigError, match=rf"rows\.jsonl': the reward fails for every text tried: {cause}"):
        shown(tmp_path, reward, rollout={"reward_timeout": 1.0})


@pytest.mark.parametrize("write", [json.dumps, str])
@pytest.mark.parametrize("settings", [{}, {"system_prompt": "Be brief."}])
def test_messages_that_are_text_are_noticed(tmp_path, write, settings):
    rows(tmp_path, write([{"role": "user", "content": "What is 17 plus 25?"}]))
    _, notes = shown(tmp_path, model=real_model("smollm2"), entry=settings)
    assert any("rows.jsonl': prompts are text that looks like a list of messages" in note for note in notes)


def test_an_unknown_role_is_noticed(tmp_path):
    rows(tmp_path, [{"role": "usr", "content": "Hello"}])
    _, notes = shown(tmp_path, model=real_model("smollm2"))
    assert any("messages have the role 'usr'" in note for note in notes)


def test_tokens_beyond_the_vocabulary_are_found(tmp_path):
    rows(tmp_path)
    model = make_small_model(tmp_path / "model", "qwen3", edits={"vocab_size": 9})
    tensors = load_file(model / "model.safetensors")
    save_file(
        {name: t[:9].clone() if "embed" in name else t for name, t in tensors.items()}, model / "model.safetensors"
    )
    for file in tiny_model().glob("tokenizer*"):
        shutil.copy(file, model)
    with pytest.raises(ConfigError, match=r"a prompt has token \d+, and the model's config.json has vocab_size=9"):
        shown(tmp_path, model=model)


def test_rewards_that_do_not_count_are_not_asked_for_numbers(tmp_path):
    environment = {"type": "dataset", "name": str(rows(tmp_path)), "rewards": []}
    loss = {"type": "dapo", "kl": {"coef": 1, "model": str(tiny_model("llama"))}}
    notes: list[str] = []
    lines = preview(Trainer(str(tiny_model()), environments=[environment], loss=loss).config, CPU, notes.append)
    assert not [line for line in [*lines, *notes] if "the reward is" in line or "no reward" in line]


def test_a_reference_with_another_vocabulary_is_found(tmp_path):
    rows(tmp_path)
    loss = {"type": "dapo", "kl": {"coef": 1, "model": str(tiny_model(vocab=120))}}
    with pytest.raises(ConfigError, match=r"loss\.kl\.model=.* differs from the policy's in 16 entries, such as"):
        shown(tmp_path, loss=loss)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"args": {"blok_size": 16}},
            r"engine\.args\.blok_size: not an engine argument of vLLM .*did you mean block_size",
        ),
        ({"args": {"kv_cache_dtype": "fp7"}}, r"engine\.args\.kv_cache_dtype='fp7': must be 'auto', .*'fp8'"),
        (
            {"args": {"enable_prefix_caching": "maybe"}},
            r"engine\.args\.enable_prefix_caching='maybe': must be true or false",
        ),
        (
            {"args": {"max_num_batched_tokens": "64"}},
            r"engine\.args\.max_num_batched_tokens='64': must be a whole number",
        ),
        ({"kv_cache_memory_bytes": 1024}, r"engine\.kv_cache_memory_bytes=1024: one sequence of \d+ tokens needs"),
    ],
)
def test_engine_settings_are_checked_before_weights_are_read(tmp_path, engine, message):
    rows(tmp_path)
    with pytest.raises(ConfigError, match=message):
        shown(tmp_path, engine=engine)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["q_porj"]}, r"policy.lora.target_modules: no module is called 'q_porj'; linear layers of"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens is no linear layer; only linear layers inside the model"),
        ({"target_modules": "q_proj"}, "down_proj; text is a regular expression for whole names$"),
        ({"exclude_modules": ".*proj"}, "matches no layer; linear layers of this model: q_proj, k_proj"),
    ],
)
def test_targets_of_an_adapter_are_checked_without_weights(tmp_path, lora, message):
    rows(tmp_path)
    with pytest.raises(ConfigError, match=message):
        shown(tmp_path, policy={"lora": lora})


def test_damaged_weights_are_named(world, tmp_path):
    folder = make_small_model(tmp_path / "model", "qwen3")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "o_proj" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"'{re.escape(name)}' has NaN or infinite values"):
        policy_of(config_of(folder), world)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("final_model/config.json", "the folder of a run, whose model is .*final_model"),
        ("adapter_config.json", "it is an adapter: name its base model, and set policy.lora.init"),
        ("notes.txt", "expected a saved transformers model"),
    ],
)
def test_a_folder_that_is_no_model_is_told_apart(tmp_path, file, message):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=message):
        read_config_json(ModelConfig(name=str(tmp_path)))


def test_an_adapter_as_teacher_gets_advice_for_the_teacher(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="it is an adapter: merge it into its base model") as caught:
        read_config_json(ModelConfig(name=str(tmp_path)), "loss.kl.model")
    assert "policy.lora.init" not in str(caught.value)


def test_a_gguf_file_is_told_apart(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="a file; expected the folder of a transformers model"):
        read_config_json(ModelConfig(name=str(tmp_path / "model.gguf")))


def test_a_program_checks_its_run_in_the_same_way(tmp_path, capsys):
    environment = {"type": "dataset", "name": str(rows(tmp_path)), "rewards": [f"{tmp_path}/my_rewards.py:of_both"]}
    given = {"output_dir": str(tmp_path), "run_name": "begun"}
    trainer = Trainer(str(tiny_model()), environments=[environment], **given)
    (saved := tmp_path / "begun/checkpoints/step_000001").mkdir(parents=True)
    (saved / "trainer.json").write_text("{}")
    with pytest.raises(ConfigError, match="begun already contains a run; add --resume"):
        trainer.check()
    trainer.check(resume="auto")
    assert "the reward is 0.3333 for '42'" in capsys.readouterr().out


def test_a_reward_model_is_not_run_and_the_other_rewards_are_shown(tmp_path):
    rows(tmp_path)
    reward_model = make_reward_model(tmp_path / "judging")
    (reward_model / "model.safetensors").write_bytes(b"not read")
    names = [str(reward_model), f"{tmp_path}/my_rewards.py:of_both"]
    entry = {"type": "dataset", "name": str(tmp_path / "rows.jsonl"), "rewards": names}
    notes: list[str] = []
    lines = preview(Trainer(str(tiny_model()), environments=[entry]).config, CPU, notes.append)
    unread = "none (judging: a dry run reads no weights; of_both:"
    assert any(f"the reward is {unread} 0.3333) for '42', {unread} 0) for" in line for line in lines)
    assert not [note for note in notes if "no reward for" in note]


def test_exact_numerics_that_the_device_cannot_compute_are_found(tmp_path):
    rows(tmp_path)
    with pytest.raises(ConfigError, match=r"numerics=exact: 16-bit norms .*; set policy\.compute_dtype: float32"):
        shown(tmp_path, numerics="exact", policy={"compute_dtype": "bfloat16"})
