"""A run that pushes its adapter to a small Hub on this machine, whose first push fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from colocated_grpo.tracking import files
from tests.support.fake_hub import TOKEN, FakeHub, fake_hub
from tests.support.training_runs import ForkedRun, TrainingRun, settings, tiny_model

STEPS = 4


@pytest.fixture(scope="module")
def pushed(tmp_path_factory) -> tuple[TrainingRun, FakeHub]:
    config = settings(
        tiny_model(),
        training_steps=STEPS,
        policy={"lora": {"rank": 4}},
        evaluation={"every": 2},
        hub={"repo": "me/sorts", "every": 2},
    )
    with fake_hub() as server:
        failures = [500]  # of the first commit
        server.failure = lambda path: failures.pop() if "/commit/" in path and failures else None
        with ForkedRun(tmp_path_factory.mktemp("pushed"), config, ranks=2, environment=server.variables) as run:
            run.finish()
    return run, server


def test_a_failed_push_costs_no_run_and_the_final_adapter_arrives(pushed):
    run, server = pushed
    assert "warning: hub: step_2: failed, number 1 in this run: " in run.stdout
    assert f"hub: pushed final_adapter: {server.url}/me/sorts/commit/" in run.stdout
    assert server.messages == ["final_adapter of run"]
    exported = {path.name: path.read_bytes() for path in (run.folder / "final_adapter").iterdir()}
    arrived = server.repositories["me/sorts"]
    assert {name: arrived[name] for name in exported if name != "checksums.json"} == {
        name: content for name, content in exported.items() if name != "checksums.json"
    }
    assert all("hub/failed" in row for row in run.rows(files.TRAIN))
    assert not (run.folder / "hub").exists()


def test_the_card_describes_the_run_and_what_it_says_to_load_loads(pushed, tmp_path):
    run, server = pushed
    for name, content in server.repositories["me/sorts"].items():
        (tmp_path / name).write_bytes(content)
    _, metadata, card = (tmp_path / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(metadata)["library_name"] == "peft"
    assert "base_model" not in metadata, "a folder of this machine is no model of the Hub"
    held_out = run.rows(files.EVALUATION)
    for line in (
        f"{STEPS} of {STEPS} steps of reinforcement learning (dapo)",
        f"(step {held_out[-1]['step']})` |",
        "| `task` | `sorting` |",
        "| `policy.lora.rank` | `4` |",
    ):
        assert line in card
    assert str(Path(tiny_model()).parent) not in card
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model()), tmp_path)
    assert any(torch.count_nonzero(value) for name, value in model.named_parameters() if "lora_B" in name)


def test_no_file_of_the_run_has_the_token(pushed):
    run, _ = pushed
    written = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
