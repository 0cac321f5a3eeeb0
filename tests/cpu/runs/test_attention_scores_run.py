"""Runs that train attention sinks, capped scores and latent attention: engine and policy agree while weights move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from safetensors.torch import load_file

from benchmarks.workload import MAX_PROMPT_TOKENS, TASK
from colocated_grpo.tracking import files
from tests.support.families import SETTINGS
from tests.support.training_runs import TrainingRun, assert_on_policy, settings, tiny_model, train

STEPS = 3


def trained(folder, architecture: str, **policy: object) -> TrainingRun:
    config = settings(
        tiny_model(architecture, edits=SETTINGS[architecture]),
        environments=[{"type": "task", "name": TASK}],  # rewards differ at once, so that every step moves the weights
        rollout={"max_prompt_tokens": MAX_PROMPT_TOKENS},
        training_steps=STEPS,
        policy={"lr": 2e-3, **policy},
        evaluation={"every": 0},
    )
    return train(folder, config)


def assert_trained(run: TrainingRun, architecture: str, is_part: Callable[[str], bool], *, parts: int) -> None:
    """Assert that the export has the tensors of the base, and that the `parts` of them that `is_part` names changed."""
    base, final = (
        load_file(path / "model.safetensors")
        for path in (tiny_model(architecture, edits=SETTINGS[architecture]), run.folder / "final_model")
    )
    assert {name: tensor.shape for name, tensor in base.items()} == {name: t.shape for name, t in final.items()}
    names = [name for name in final if is_part(name)]
    assert len(names) == parts
    assert all((base[name].float() - final[name].float()).abs().max() > 1e-4 for name in names)


@pytest.mark.parametrize("replay", [False, True])
def test_a_model_with_attention_sinks_trains_them(tmp_path, replay):
    run = trained(tmp_path, "gpt_oss", routing_replay=replay)
    assert_on_policy(run, STEPS)
    assert_trained(run, "gpt_oss", lambda name: name.endswith(("sinks", "_bias", "router.bias")), parts=2 * 4)
    if replay:
        assert {row["mismatch/routes"] for row in run.rows(files.TRAIN)} == {0.0}


def test_a_model_with_soft_capped_scores_trains(tmp_path):
    assert_on_policy(trained(tmp_path, "gemma2"), STEPS)


@pytest.mark.parametrize("replay", [False, True])
def test_a_model_with_latent_attention_trains(tmp_path, replay):
    run = trained(tmp_path, "deepseek_v3", routing_replay=replay)
    assert_on_policy(run, STEPS)
    assert_trained(run, "deepseek_v3", lambda name: ".self_attn.kv_" in name, parts=2 * 3)
    if replay:
        assert {row["mismatch/routes"] for row in run.rows(files.TRAIN)} == {0.0}
