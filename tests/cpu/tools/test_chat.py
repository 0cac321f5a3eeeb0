"""Chat with an adapter beside its base in the real engine; which model of a run the tools use."""

from __future__ import annotations

import http.server
import io
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocated_grpo.environments.chat import render_tokens
from colocated_grpo.servers.options import subject_of
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.tools import chat
from colocated_grpo.types import JsonObject
from tests.support.chat_process import TIMEOUT, ChatProcess
from tests.support.raw_server import response
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
    """A conversation that fills its context, is begun again, and ended by Ctrl-C."""
    limits = ["--context", str(CONTEXT), "--max-tokens", str(MAX_TOKENS), "--temperature", "0"]
    heard: dict[str, str | int | None] = {}
    with ChatProcess(tmp_path_factory.mktemp("chat"), [str(adapter), "--system", "be brief", *limits]) as process:
        process.say("hello", "")
        heard["first"] = process.hear()
        process.say("and now", "and then", "and at last", "/reset", "hello")
        heard["second"] = process.hear()
        heard["third"] = process.hear()
        heard["after reset"] = process.hear()
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
    assert full.startswith("error: 400 the prompt has ")
    assert f" the maximum context length of {CONTEXT} " in full
    assert full.endswith("; /reset begins a new conversation")


def test_ctrl_c_between_replies_ends_the_chat(heard):
    assert heard["code"] == 0


def test_ctrl_c_ends_a_reply_and_its_connection(tmp_path):
    """The first reply has an end only if the client closes the connection."""
    closed = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.connection.sendall(response(b'{"chat_template": true}'))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            event = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'
            self.connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + event)
            if closed.is_set():
                self.connection.sendall(event + b"data: [DONE]\n\n")
            elif self.rfile.read() == b"":
                closed.set()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        with ChatProcess(tmp_path, [f"http://127.0.0.1:{server.server_port}"]) as process:
            process.say("hello")
            begin = process.hear_begin()
            process.interrupt()
            assert begin + process.hear() == "hi"
            assert closed.wait(TIMEOUT)
            process.say("hello")
            assert process.hear() == "hihi"
        server.shutdown()


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
    shutil.copytree(run / "adapter_step_10", run / "best_adapter")
    os.utime(run / "best_model", (0, 0))
    assert subject_of(str(run)).adapter == run / "best_adapter", "the newest"


class PlainServer:
    """Serves a model without a chat template."""

    def __init__(self) -> None:
        self.bodies: list[JsonObject] = []

    def get(self, path: str) -> JsonObject:
        return {"chat_template": False}

    def lines(self, path: str, silence: float, body: JsonObject) -> Iterator[str]:
        self.bodies.append({"path": path, **body})
        yield f"data: {json.dumps({'choices': [{'text': 'and '}]})}"
        yield f"data: {json.dumps({'choices': [{'text': 'so on'}]})}"
        yield "data: [DONE]"


@pytest.fixture
def plain(monkeypatch) -> PlainServer:
    server = PlainServer()
    monkeypatch.setattr(chat, "_server", lambda options, overrides: nullcontext(server))
    return server


def test_a_model_without_a_chat_template_continues_each_line_by_itself(plain, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/quit\nthree\n"))
    assert chat.main(["some/model", "--temperature", "0", "--max-tokens", "7"]) == 0
    assert capsys.readouterr().out.splitlines() == ["and so on"] * 2
    assert [body["prompt"] for body in plain.bodies] == ["one", "two"]
    assert {(body["path"], body["temperature"], body["max_tokens"]) for body in plain.bodies} == {
        ("/v1/completions", 0, 7)
    }


def test_a_system_message_without_a_chat_template_is_rejected(plain, capsys):
    assert chat.main(["some/model", "--system", "be brief"]) == 2
    line = "error: --system: this model has no chat template; set one with --model.chat_template FILE"
    assert capsys.readouterr().err.splitlines() == [line]


def test_the_server_of_a_chat_exports_no_weights_and_decodes_one_sequence(monkeypatch):
    commands: list[list[str]] = []
    monkeypatch.setattr(chat, "local_servers", lambda command, folder: sys.exit(commands.append(command)))
    with pytest.raises(SystemExit):
        chat.main([str(tiny_model()), "--engine.placement", "server", "--engine.bridge", "shared"])
    [command] = commands
    assert "--share-weights" not in command
    assert command[command.index("--max-num-seqs") + 1] == "1"


def test_a_server_that_ends_at_its_start_is_shown_with_the_end_of_its_log(capsys, monkeypatch):
    failing = [sys.executable, "-c", "import sys; sys.exit('error: no room for the weights')"]
    monkeypatch.setattr(chat, "serve_command", lambda *_: failing)
    assert chat.main([str(tiny_model())]) == 1
    loading, ended, cause = capsys.readouterr().err.splitlines()
    assert loading.startswith("loading ")
    assert ended.startswith("error: an engine server ended with exit code 1; the end of ")
    assert cause == "  error: no room for the weights"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere/at/all"], "model.name='nowhere/at/all': no such folder"),
        (["some/model", "--policy.lerning_rate", "1"], "policy.lerning_rate: unknown key; did you mean policy.lr?"),
        (["http://localhost:1", "--seed", "1"], "--seed: a server is running with its settings; restart it"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1: the server does not answer: "),
    ],
)
def test_what_cannot_be_loaded_is_one_line(arguments, line, capsys):
    assert chat.main(arguments) > 0
    [printed] = capsys.readouterr().err.splitlines()
    assert printed.startswith(f"error: {line}")


@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [("--temperature", "3", "from 0 (greedy) to 2"), ("--context", "0", "a positive whole number")],
)
def test_a_flag_out_of_its_bounds_is_one_line(flag, value, rule, capsys):
    with pytest.raises(SystemExit, match="2"):
        chat.main(["some/model", flag, value])
    assert capsys.readouterr().err == f"error: {flag}: '{value}': must be {rule}\n"
