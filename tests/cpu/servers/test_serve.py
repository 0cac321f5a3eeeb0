"""The engine server as a process of its own: it answers as the model computes, pauses, sleeps, and ends cleanly.

The tests use two servers. The guarded one is ended by a test, after all others that use it.
"""

from __future__ import annotations

import io
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from colocated_grpo.runtime.checksums import write_checksums
from colocated_grpo.runtime.program import KEY_VARIABLE
from colocated_grpo.servers.options import parse
from colocated_grpo.tools import chat
from tests.support.paths import ROOT
from tests.support.saved_runs import invert
from tests.support.serve_process import MAX_TOKENS, START_SECONDS, ServeProcess
from tests.support.servers import free_port, until
from tests.support.training_runs import tiny_model

PROMPT = [5, 40, 17, 62, 8, 33] * 4
"""Longer than a block of the KV cache, so that cached prefixes are used."""


KEY = "secret"


class Generating(ServeProcess):
    """A server that completes PROMPT."""

    def generate(self, **parameters: Any) -> dict[str, Any]:
        return self.done("/generate", {"prompt": {"prompt_token_ids": PROMPT}, "seed": 3, **parameters})


class Guarded(Generating):
    """A server that accepts adapters, and only requests with a key. It has a chat template of its own."""

    def __init__(self) -> None:
        template = ("--chat-template", "{{ start }}{{ messages[0].content }}", "--chat-template-kwargs", '{"start": 1}')
        flags = ("--enable-lora", "--max-lora-rank", "16", "--api-key-variable", "KEY", *template)
        super().__init__(tiny_model(), *flags, environment={"KEY": KEY})

    def call(self, method: str, path: str, body: Any = None, key: str | None = KEY) -> tuple[int, Any]:
        return super().call(method, path, body, key)


@pytest.fixture(scope="module")
def starting() -> Iterator[tuple[Generating, Guarded]]:
    """The servers, which start at the same time."""
    with Generating(tiny_model()) as server, Guarded() as guarded:
        yield server, guarded


@pytest.fixture(scope="module")
def server(starting) -> Generating:
    starting[0].wait_until_ready()
    return starting[0]


@pytest.fixture(scope="module")
def guarded(starting) -> Guarded:
    starting[1].wait_until_ready()
    return starting[1]


def tiny_lm() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)


@torch.no_grad()
def logprobs_of(model: nn.Module, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Return the log-probabilities, outside of vLLM, of the tokens after PROMPT."""
    logits = model(torch.tensor([tokens])).logits[0]
    every = torch.log_softmax(logits[:-1] / temperature, dim=-1)
    return every.gather(1, torch.tensor(tokens[1:])[:, None])[len(PROMPT) - 1 :, 0].tolist()


def test_sampled_tokens_have_the_log_probabilities_of_the_model(server):
    reply = server.generate(max_tokens=16, temperature=0.7, ignore_eos=True)
    (tokens,), (logprobs,) = reply["token_ids"], reply["logprobs"]
    assert len(tokens) == 16
    sampled = [next(iter(entry.items())) for (entry,) in logprobs]
    assert [int(token) for token, _ in sampled] == tokens
    expected = logprobs_of(tiny_lm(), PROMPT + tokens, 0.7)
    assert [value for _, value in sampled] == pytest.approx(expected, abs=1e-4)


def test_openai_clients_are_served(server):
    client = openai.OpenAI(api_key="x", base_url=f"http://127.0.0.1:{server.port}/v1", max_retries=0)
    assert [model.max_model_len for model in client.models.list()] == [MAX_TOKENS]
    messages: Any = [{"role": "user", "content": "12"}]
    reply = client.chat.completions.create(model="any", messages=messages, max_tokens=4, seed=1)
    assert reply.usage.completion_tokens <= 4


def test_a_chat_with_its_address_uses_its_chat_template(guarded, monkeypatch, capsys):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr("sys.stdin", io.StringIO("23\n"))
    assert chat.main([guarded.url, "--temperature", "0", "--max-tokens", "5"]) == 0
    plain = guarded.done("/v1/completions", {"prompt": "123", "temperature": 0, "max_tokens": 5})
    assert capsys.readouterr().out == plain["choices"][0]["text"] + "\n"


def test_facts_are_those_of_the_engine(server):
    status, info = server.call("GET", "/bridge/info")
    assert status == 200
    assert psutil.Process(info["pid"]).ppid() == server.process.pid
    assert (info["model"], info["max_model_len"]) == (str(tiny_model()), MAX_TOKENS)
    assert info["num_parameters"] >= tiny_lm().num_parameters()


def in_background(server: Generating, answers: list[Any], **parameters: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(server.generate(**parameters)))
    thread.start()
    return thread


def save_adapter(folder: Path, rank: int) -> Path:
    """Save a random adapter of the tiny model with PEFT."""
    torch.manual_seed(rank)
    model = get_peft_model(tiny_lm(), LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(str(folder))
    return folder


def filled_adapter(source: Path, folder: Path, value: float) -> Path:
    """Save the adapter with one matrix full of `value`."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[next(name for name in tensors if ".lora_A." in name)].fill_(value)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def cut_adapter(source: Path, folder: Path) -> Path:
    """Save the adapter with the matrices of query projections cut by one input."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    cut = {name: matrix[:, :-1].contiguous() for name, matrix in tensors.items() if "q_proj.lora_A" in name}
    save_file({**tensors, **cut}, folder / "adapter_model.safetensors")
    return folder


def sampled(server: Generating) -> tuple[list[int], list[float]]:
    reply = server.generate(max_tokens=12, ignore_eos=True)
    return reply["token_ids"][0], [next(iter(entry.values())) for (entry,) in reply["logprobs"][0]]


def test_adapters_are_exchanged_while_the_server_runs(guarded, tmp_path):
    first, second = (save_adapter(tmp_path / str(rank), rank) for rank in (8, 16))
    process, plain = guarded.call("GET", "/bridge/info")[1]["pid"], sampled(guarded)
    for path, body in [
        ("/lora/load", {"adapter_path": str(first)}),
        ("/v1/load_lora_adapter", {"lora_name": "16", "lora_path": str(second)}),
        ("/lora/load", {"adapter_path": str(first), "adapter_name": "16"}),
    ]:
        status = guarded.done(path, body)
        assert status.pop("exported") is None, "PEFT writes no checksums"
        tokens, logprobs = sampled(guarded)
        adapted = PeftModel.from_pretrained(tiny_lm(), status["adapter_path"])
        assert logprobs == pytest.approx(logprobs_of(adapted, PROMPT + tokens), abs=1e-4)
        assert (tokens, logprobs) != plain
    assert (
        guarded.call("GET", "/lora/status")[1]
        == status
        == {"enabled": True, "adapter_name": "16", "adapter_path": str(first)}
    )
    large, damaged = save_adapter(tmp_path / "large", 64), save_adapter(tmp_path / "damaged", 8)
    write_checksums(damaged)
    invert(damaged / "adapter_model.safetensors")
    nan, narrow = filled_adapter(first, tmp_path / "nan", math.nan), cut_adapter(first, tmp_path / "narrow")
    for path, body, line in [
        ("/lora/load", {"adapter_path": str(nan)}, "lora_A.weight has numbers that are not finite"),
        ("/lora/load", {"adapter_path": str(narrow)}, "q_proj has the factors [8, "),
        ("/lora/load", {"adapter_path": "nowhere"}, "adapter='nowhere': no adapter_config.json in this folder"),
        ("/lora/load", {"adapter_path": str(large)}, "LoRA rank 64 is greater than max_lora_rank 16"),
        ("/lora/load", {"adapter_path": str(damaged)}, "adapter_model.safetensors differs from its checksum"),
    ]:
        status, response = guarded.call("POST", path, body)
        assert status == 400
        assert line in response["error"]["message"]
    assert sampled(guarded) == (tokens, logprobs)
    guarded.done("/lora/load", {"adapter_path": str(filled_adapter(first, tmp_path / "huge", 3e38))})
    guarded.generate(n=256, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=None)  # in the blocks of the whole cache
    guarded.done("/lora/unload")
    assert sampled(guarded) == plain
    assert guarded.call("GET", "/bridge/info")[1]["pid"] == process


def test_a_server_without_adapters_says_how_to_allow_them(server, tmp_path):
    status, response = server.call("POST", "/lora/load", {"adapter_path": str(save_adapter(tmp_path / "a", 8))})
    assert (status, response["error"]["message"]) == (400, "the server was started without --enable-lora")
    assert not server.call("GET", "/lora/status")[1]["enabled"]


def test_requests_wait_while_the_engine_is_paused(server):
    expected = server.generate(max_tokens=8)
    assert server.done("/bridge/pause")["is_paused"]
    assert server.call("GET", "/bridge/info")[1]["is_paused"]
    answers: list[Any] = []
    thread = in_background(server, answers, max_tokens=8)
    assert server.call("GET", "/health") == (200, {"status": "paused"})  # after the request, on another connection
    assert not answers
    assert not server.done("/bridge/resume")["is_paused"]
    thread.join(timeout=START_SECONDS)
    assert answers == [expected]


def test_a_completion_paused_halfway_has_the_same_tokens(server):
    expected = server.generate(max_tokens=MAX_TOKENS - 8, ignore_eos=True)
    answers: list[Any] = []
    thread = in_background(server, answers, max_tokens=MAX_TOKENS - 8, ignore_eos=True)
    for _ in range(3):
        server.done("/bridge/pause")
        server.done("/bridge/resume")
    thread.join(timeout=START_SECONDS)
    assert answers == [expected]


@pytest.mark.parametrize(
    ("method", "path", "body", "line"),
    [
        ("POST", "/bridge/init", {}, "no trainer is attached; GET /engine/stream first"),
        ("POST", "/bridge/update", {}, "no trainer is attached; GET /engine/stream first"),
        ("POST", "/bridge/restart", {"model": "nowhere"}, "model='nowhere': no config.json in this folder"),
        ("POST", "/bridge/notify_update", {}, "Not Found"),
        ("POST", "/generate", {"prompt": "1" * 200}, "200 tokens; with at least one .* 64 [(]--max-model-len[)]"),
        ("POST", "/generate", {"prompt": "1", "temprature": 1}, "temprature"),
    ],
)
def test_requests_that_cannot_be_served_get_one_sentence(server, method, path, body, line):
    status, response = server.call(method, path, body)
    assert status in (400, 404, 409)
    assert re.search(line, response["error"]["message"])


def test_a_server_with_a_key_rejects_requests_without_it(guarded):
    assert guarded.call("GET", "/health", key=None)[0] == 200
    assert guarded.call("GET", "/bridge/info", key=None)[0] == 401
    assert guarded.call("GET", "/bridge/info")[0] == 200


def test_a_port_that_is_taken_is_named(guarded):
    with Generating(tiny_model(), "--port", str(guarded.port)) as second:
        _, errors = second.process.communicate(timeout=START_SECONDS)
    assert second.process.returncode == 2
    assert errors.startswith(f"error: --port={guarded.port}: cannot listen on 127.0.0.1 (Address already in use)")
    assert errors.count("\n") == 1


def test_a_signal_ends_the_server_and_frees_its_port(guarded):
    guarded.process.send_signal(signal.SIGTERM)
    assert guarded.process.wait(timeout=START_SECONDS) == 0
    until(lambda: not is_open(guarded.port))


def is_open(port: int) -> bool:
    try:
        HTTPConnection("127.0.0.1", port, timeout=1).connect()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--max-model-len", "1"], "error: --max-model-len: '1': must be at least 2"),
        (["--max-lora-rank", "7"], "error: --max-lora-rank: invalid choice: 7"),
        (["--max-num-seqs", "0"], "error: --max-num-seqs: '0': must be a positive whole number"),
        (["--engine-args", "[]"], "error: --engine-args: '[]': must be a JSON object"),
        (["--gpu-memory-utilization", "2"], "error: --gpu-memory-utilization: '2': must be above 0 and at most 1"),
        (["--port", "99999"], "error: --port: '99999': must be a port"),
        (["--api-key-variable", "NO_SUCH_KEY"], "error: --api-key-variable=NO_SUCH_KEY: this environment variable is"),
        (["--nonsense"], "error: unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_arguments_end_in_one_line(flags, line):
    with Generating(tiny_model(), *flags) as server:
        _, errors = server.process.communicate(timeout=START_SECONDS)
    assert server.process.returncode == 2
    assert errors.startswith(line)
    assert errors.count("\n") == 1


def test_the_model_is_an_argument_or_a_flag_as_in_atropos_example_server(capsys):
    assert parse(["--model", "folder", "--port", "1"]) == parse(["folder", "--port", "1"])
    for arguments in ([], ["folder", "--model", "folder"]):
        with pytest.raises(SystemExit, match="2"):
            parse(arguments)
        assert capsys.readouterr().err == "error: MODEL: must be given once, as MODEL or as --model MODEL\n"


@pytest.mark.parametrize(("size", "shares"), [(1, True), (2, False)])
def test_the_variable_of_shared_weights_is_for_one_gpu_as_its_users_also_broadcast(monkeypatch, size, shares):
    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", "1")
    assert parse(["folder", "--tensor-parallel-size", str(size)]).share_weights == shares


def test_a_model_that_does_not_exist_is_named(tmp_path):
    with Generating(tmp_path / "nothing", "--port", str(free_port())) as server:
        _, errors = server.process.communicate(timeout=START_SECONDS)
    assert server.process.returncode == 2
    assert errors == f"error: model.name='{tmp_path / 'nothing'}': no such folder\n"


def test_a_run_is_served_with_its_newest_adapter_and_its_chat_template(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"model: {{name: {tiny_model()}, chat_template: '{{{{ 7 }}}}'}}")
    with Generating(run) as server:
        _, errors = server.process.communicate(timeout=START_SECONDS)
    assert server.process.returncode == 2
    assert errors.startswith(f"error: MODEL='{run}': this run has exported no model yet") and errors.count("\n") == 1
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(tiny_lm(), lora).save_pretrained(run / "adapter_step_2")
    served = PeftModel.from_pretrained(tiny_lm(), run / "adapter_step_2")
    with Generating(run) as server:
        server.wait_until_ready()
        sampled = server.generate(max_tokens=8, temperature=0.0, ignore_eos=True)
        chat = server.done("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1})
    logprobs = [value for (entry,) in sampled["logprobs"][0] for value in entry.values()]
    assert logprobs == pytest.approx(logprobs_of(served, PROMPT + sampled["token_ids"][0]), abs=1e-4)
    assert chat["usage"]["prompt_tokens"] == 1


def test_the_launcher_starts_servers_too():
    command = [sys.executable, "run_colocated_grpo.py", "serve", "--help"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.startswith("usage: colocated-grpo serve")
