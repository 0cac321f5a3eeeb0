"""Pushes with the real client to a small Hub on this machine: what arrives, and what failures cost."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.inputs import check_hub
from colocated_grpo.settings.rules import check
from colocated_grpo.settings.schema import Config
from colocated_grpo.tracking.hub import STAGING, Hub, card
from tests.support.fake_hub import TOKEN, FakeHub, fake_hub
from tests.support.servers import free_port
from tests.support.tracked_run import config_of, finished_run

WEIGHTS = b"weights" * 1000


def config(**hub: object) -> Config:
    return Config.model_validate({**config_of().model_dump(), "hub": {"repo": "me/taught", "every": 2, **hub}})


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = finished_run(tmp_path_factory.mktemp("runs") / "run")
    (folder / "final_model").mkdir()
    fill(folder / "final_model")
    return folder


def fill(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "config.json").write_text("{}")
    (folder / "checksums.json").write_text("{}")
    return folder


class Pushes:
    """A run's pushes, and the lines that it shows."""

    def __init__(self, run_dir: Path, **settings: object) -> None:
        self.lines: list[str] = []
        configured = config(**settings)
        assert configured.hub is not None
        self.hub = Hub(configured.hub, run_dir, configured.training_steps, False, self.lines.append)
        self._final = run_dir / "final_model"

    def push(self, step: int) -> None:
        self.hub.push(fill(self.hub.staging(step)), step)

    def push_final(self) -> None:
        self.hub.push(self._final, 6)

    def finish(self) -> float:
        """Wait for all pushes, and return how many have failed."""
        while self.hub.pending(60.0, stopped=False):
            pass
        return self.hub.metrics()["hub/failed"]


@pytest.fixture
def server(monkeypatch):
    with fake_hub() as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        yield server


def test_steps_and_the_final_model_are_pushed_one_after_the_other(run_dir, server: FakeHub):
    pushes = Pushes(run_dir)
    assert [step for step in range(1, 7) if pushes.hub.due(step)] == [2, 4], "the last one is pushed as the final one"
    server.block.clear()
    pushes.hub.start()
    assert pushes.hub.free(2), "creating the repository is no push"
    pushes.push(2)
    assert not pushes.hub.free(4)
    assert pushes.lines == ["hub: step 4 is not pushed, as step_2 is still being pushed"]
    server.block.set()
    assert pushes.finish() == 0
    pushes.push_final()
    assert pushes.finish() == 0
    assert server.messages == ["step_2 of run", "final_model of run"]
    assert server.private == {"me/taught": True}
    files = server.repositories["me/taught"]
    assert set(files) == {"README.md", "config.json", "model.safetensors"}
    assert files["model.safetensors"] == WEIGHTS
    assert pushes.lines[1].startswith(f"hub: pushed step_2: {server.url}/me/taught/commit/")
    assert not (run_dir / STAGING).exists()
    assert {path.name for path in (run_dir / "final_model").iterdir()} == {*files, "checksums.json"}


def test_a_failed_push_is_a_line_and_the_next_one_succeeds(run_dir, server: FakeHub):
    server.failure = lambda path: 500 if "commit" in path else None
    pushes = Pushes(run_dir)
    pushes.push(2)
    assert pushes.finish() == 1
    server.failure = lambda path: None
    pushes.push_final()
    assert pushes.finish() == 1
    failed, pushed = pushes.lines
    assert failed.startswith("warning: hub: step_2: failed, number 1 in this run: Server error '500 Internal")
    assert failed.endswith("broken on purpose")
    assert pushed.startswith("hub: pushed final_model: ")


def test_a_slow_push_is_ended_and_a_wrong_token_is_noted_at_the_start(run_dir, server: FakeHub, monkeypatch):
    server.block.clear()
    pushes = Pushes(run_dir, timeout=3.0)
    pushes.push_final()
    assert pushes.finish() == 1
    [line] = pushes.lines
    failed, command = line.split("; push it with: ")
    assert failed == "warning: hub: final_model: failed, number 1 in this run: longer than hub.timeout=3 s"
    assert shlex.split(command)[:5] == ["hf", "upload", "me/taught", f"{run_dir}/final_model", "."]
    server.block.set()
    subprocess.run([sys.executable, "-m", "huggingface_hub.cli.hf", *shlex.split(command)[1:]], check=True)
    assert server.messages == ["final_model of run"]
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrong")
    pushes.hub.start()
    assert pushes.finish() == 2
    assert "repository me/taught: failed, number 2 in this run: " in pushes.lines[1]
    assert "hf_wrong" not in "".join(pushes.lines) and TOKEN not in "".join(pushes.lines)


def test_an_unreachable_hub_and_a_run_that_ends_first_cost_a_line_each(run_dir, server: FakeHub, monkeypatch):
    server.block.clear()
    ended = Pushes(run_dir)
    ended.push(2)
    ended.hub.close()
    assert ended.lines == ["warning: hub: step_2: failed, number 1 in this run: the run ended first"]
    assert not (run_dir / STAGING).exists()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    refused = Pushes(run_dir)
    refused.push(2)
    assert refused.finish() == 1
    assert "Connection refused" in refused.lines[0]


def test_what_cannot_be_started_or_is_killed_is_a_line_and_later_pushes_go_on(run_dir, server, monkeypatch):
    pushes = Pushes(run_dir)
    with monkeypatch.context() as broken:
        broken.setattr("sys.executable", "/nowhere/python")
        pushes.push(2)
        pushes.push_final()
        assert pushes.finish() == 2, "both have failed"
    with monkeypatch.context() as broken:
        program = run_dir / "program"
        program.write_text("#!/bin/sh\nkill -9 $$\n")
        program.chmod(0o755)
        broken.setattr("sys.executable", str(program))
        pushes.push(4)
        assert pushes.finish() == 3
    assert "exit code -9" in pushes.lines[-1]
    pushes.push_final()
    assert pushes.finish() == 3 and pushes.lines[-1].startswith("hub: pushed final_model: ")


def test_the_card_names_no_path_of_this_machine_and_models_of_the_hub(tmp_path):
    config = config_of().model_dump(mode="json")
    rows = [{"step": step, "kind": "train", "reward": step / 4, "eval/aime/pass@8": 0.5} for step in range(3)]
    (tmp_path / "rows.jsonl").touch()
    config["environments"] = [
        {"type": "dataset", "name": str(tmp_path / "rows.jsonl"), "rewards": [{"name": "gsm8k"}]},
        {"type": "dataset", "name": "openai/gsm8k", "rewards": []},
    ]
    config["model"]["name"] = "Qwen/Qwen3-0.6B"
    text = card("me/taught", config, rows, 3, text_part=False)
    assert "base_model: Qwen/Qwen3-0.6B" in text and "datasets:\n- openai/gsm8k\n" in text
    assert "| `dataset` | `rows.jsonl` | `gsm8k` |\n| `dataset` | `openai/gsm8k` |  |" in text
    assert "| `reward` | `0 (step 0)` | `0.500 (step 2)` |\n| `eval/aime/pass@8` |" in text
    assert "vllm serve me/taught" in text and str(tmp_path) not in text
    config["policy"]["lora"] = {"rank": 4}
    adapted = card("me/taught", config, rows, 3, text_part=False)
    assert "vllm serve Qwen/Qwen3-0.6B --enable-lora --lora-modules adapter=me/taught" in adapted
    assert 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"), "me/taught")' in adapted


def test_a_push_without_effect_or_without_a_token_is_refused(monkeypatch, tmp_path):
    without = config(every=0).model_dump() | {"checkpoint": {"final": False}}
    with pytest.raises(ConfigError, match=r"hub.repo=me/taught: nothing would be pushed; set hub.every above 0"):
        check(Config.model_validate(without))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert [*check_hub(config().hub)] == [
        "hub.repo='me/taught': no token; set HF_TOKEN to one that may write, or run `hf auth login`"
    ]
    monkeypatch.setattr("huggingface_hub.get_token", lambda: TOKEN)
    assert [*check_hub(config().hub)] == []
    [line] = check_hub(config(repo="me/my model").hub)
    assert line.startswith(
        "hub.repo='me/my model': Repo id must use alphanumeric chars, '-', '_' or '.'. The name cannot"
    )
