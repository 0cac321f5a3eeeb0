"""Chat with an adapter beside its base in the real engine; which model of a run the tools use."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocated_grpo.environments.chat import render_tokens
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.tools import chat
from colocated_grpo.tools.evaluate import subject_of
from tests.support.chat_process import ChatProcess
from tests.support.training_runs import tiny_model

CONTEXT, MAX_TOKENS, RANK = 400, 150, 4


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """Return an adapter of random weights, as PEFT saves it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    settings = LoraConfig(
        r=RANK, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(base, settings).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def heard(adapter, tmp_path_factory) -> dict[str, str | int | None]:
    """A conversation that fills its context, is begun again, interrupted, and ended by Ctrl-C."""
    limits = ["--context", str(CONTEXT), "--max-tokens", str(MAX_TOKENS), "--temperature", "0"]
    heard: dict[str, str | int | None] = {}
    with ChatProcess(tmp_path_factory.mktemp("chat"), [str(adapter), "--system", "be brief", *limits]) as process:
        process.say("hello", "")
        heard["first"] = process.hear()
        process.say("and now", "and then", "and at last", "/reset", "hello")
        heard["second"] = process.hear()
        heard["third"] = process.hear()
        heard["after reset"] = process.hear()
        process.say("/reset", "hello")
        begin = process.hear_begin()
        process.interrupt()
        heard["interrupted"] = begin + process.hear()
        process.say("/reset", "hello")
        heard["after interrupt"] = process.hear()
        process.interrupt()
        heard["code"] = process.exit_code()
        heard["errors"] = process.stderr.read_text()
    return heard


def greedy(adapter: Path, tokens: int) -> str:
    """Return what transformers and PEFT sample."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    prompt = torch.tensor([render_tokens(tokenizer, messages, {})])
    model = PeftModel.from_pretrained(base, adapter)
    sampled = model.generate(input_ids=prompt, do_sample=False, max_new_tokens=tokens)[0, prompt.shape[1] :]
    return tokenizer.decode(sampled, skip_special_tokens=True)


def test_the_reply_is_what_the_adapter_says(heard, adapter):
    assert heard["first"].startswith(greedy(adapter, 20))
    assert len(heard["first"]) > 20


def test_a_conversation_continues_until_its_context_is_full_and_reset_begins_again(heard):
    assert heard["second"] != heard["first"]
    assert len(heard["third"]) < MAX_TOKENS, "what is left of the context"
    assert heard["after reset"] == heard["first"]
    loading, full = heard["errors"].splitlines()
    assert loading.startswith("loading ")
    assert full.startswith("error: the conversation has ")
    assert full.endswith(f" of {CONTEXT} tokens; /reset begins a new one")


def test_ctrl_c_ends_a_reply_and_without_one_the_chat(heard):
    assert heard["first"].startswith(heard["interrupted"])
    assert 0 < len(heard["interrupted"]) < len(heard["first"])
    assert heard["after interrupt"] == heard["first"]
    assert heard["code"] == 0


def test_a_run_stands_for_its_best_export_else_its_final_one_else_its_newest(tmp_path, adapter):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    with pytest.raises(ConfigError, match="this run has exported no model yet"):
        subject_of(str(run))
    for name in ("adapter_step_9", "adapter_step_10"):
        (run / name).mkdir()
        settings = json.loads((adapter / "adapter_config.json").read_text())
        (run / name / "adapter_config.json").write_text(json.dumps(settings))
    newest = subject_of(str(run))
    assert (newest.adapter, newest.rank) == (run / "adapter_step_10", RANK)
    assert (newest.model, newest.run_config) == (str(tiny_model()), run / "config.yaml")
    for name in ("final_model", "best_model"):
        (run / name).mkdir()
        assert subject_of(str(run)).model == str(run / name)


def test_a_system_message_without_a_chat_template_is_rejected_before_the_model_is_loaded(tmp_path, capsys, monkeypatch):
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    monkeypatch.setattr(chat.program, "exit_on_stop_signals", lambda ending: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # `main` sets the variables of a rank
    capsys.readouterr()
    assert chat.main([str(model), "--system", "be brief"]) == 2
    line = "error: --system: this model has no chat template; set one with --model.chat_template FILE"
    assert capsys.readouterr().err.splitlines() == [line], "and nothing about loading"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere/at/all"], "model.name='nowhere/at/all': no such folder"),
        (["some/model", "--temperature", "3"], "--temperature=3: must be from 0 (greedy) to 2"),
        (["some/model", "--context", "0"], "--context=0: must be at least 1"),
        (["some/model", "--policy.lerning_rate", "1"], "policy.lerning_rate: unknown key; did you mean policy.lr?"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(arguments, line, capsys, monkeypatch):
    monkeypatch.setattr(chat.program, "exit_on_stop_signals", lambda ending: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # `main` sets the variables of a rank
    assert chat.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")
