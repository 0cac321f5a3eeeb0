"""Runs that train a mixture of experts: sampled and trained probabilities agree, exports and resume are exact."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.workload import MAX_PROMPT_TOKENS, TASK
from tests.support.families import SETTINGS
from tests.support.serve_process import ServeProcess
from tests.support.served_runs import SERVER_FLAGS
from tests.support.training_runs import (
    Settings,
    TrainingRun,
    assert_on_policy,
    assert_resumes_exactly,
    settings,
    tiny_model,
    train,
)

STEPS = 3
MODEL = "qwen3_moe"


def with_experts(**changes: object) -> Settings:
    return settings(
        tiny_model(MODEL, edits=SETTINGS[MODEL]),
        deterministic=True,
        environments=[{"type": "task", "name": TASK}],  # rewards differ at once, so that every step moves the weights
        rollout={"max_prompt_tokens": MAX_PROMPT_TOKENS},
        training_steps=STEPS,
        policy={"lr": 2e-3},
        evaluation={"every": 0},
        checkpoint={"every": 1},
        **changes,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> TrainingRun:
    return train(tmp_path_factory.mktemp("whole"), with_experts(), ranks=2)


def test_engine_and_policy_agree_and_the_export_has_the_layout_of_the_hub(whole):
    assert_on_policy(whole, STEPS)
    base, final = (
        load_file(path / "model.safetensors")
        for path in (tiny_model(MODEL, edits=SETTINGS[MODEL]), whole.folder / "final_model")
    )
    assert {name: tensor.shape for name, tensor in base.items()} == {name: t.shape for name, t in final.items()}
    experts = [name for name in final if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    assert all((base[name].float() - final[name].float()).abs().max() > 1e-4 for name in experts)
    loaded = AutoModelForCausalLM.from_pretrained(whole.folder / "final_model", dtype=torch.float32)
    first = loaded.get_parameter("model.layers.0.mlp.experts.gate_up_proj")[1]
    gate, up = (final[f"model.layers.0.mlp.experts.1.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(first, torch.cat([gate, up]).float())


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(whole, tmp_path):
    assert_resumes_exactly(whole, tmp_path, with_experts(), first_step=STEPS - 1, ranks=2)


def test_an_engine_server_receives_the_experts(tmp_path):
    with ServeProcess(tiny_model(MODEL, edits=SETTINGS[MODEL]), *SERVER_FLAGS) as server:
        server.wait_until_ready()
        engine = {"placement": "server", "urls": [server.url]}
        assert_on_policy(train(tmp_path, with_experts(engine=engine)), STEPS)
