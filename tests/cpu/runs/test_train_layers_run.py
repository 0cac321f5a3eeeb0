"""Runs that train some transformer blocks: all other weights stay, resume is exact, and both kinds of weights agree."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.workload import MAX_PROMPT_TOKENS, TASK
from colocated_grpo.tracking import files
from tests.support.training_runs import (
    ForkedRun,
    Settings,
    TrainingRun,
    assert_resumes_exactly,
    checkpoint_tensors,
    deterministic,
    tiny_model,
    train,
)

STEPS = 4
TRAINED = "model.layers.1."


def one_block(weights: str, **policy: Any) -> Settings:
    """Return the settings of a run in float32 that trains the second of two blocks."""
    return deterministic(
        weights=weights,
        environments=[{"type": "task", "name": TASK}],  # rewards differ at once, so that every step moves the weights
        rollout={"max_prompt_tokens": MAX_PROMPT_TOKENS},
        training_steps=STEPS,
        policy={"lr": 2e-3, "train_layers": "1", **policy},
        batch={"minibatches": 2},
        evaluation={"every": 0},
        checkpoint={"every": 1},
    )


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> TrainingRun:
    return train(tmp_path_factory.mktemp("copied"), one_block("copied"), ranks=2)


def test_only_the_trained_block_differs_from_the_base_bit_for_bit(copied):
    base, final = (load_file(folder / "model.safetensors") for folder in (tiny_model(), copied.folder / "final_model"))
    assert base.keys() == final.keys()
    changed = {name for name in base if not torch.equal(base[name].float(), final[name].float())}
    assert changed == {name for name in base if name.startswith(TRAINED)}
    for row in copied.rows(files.TRAIN):
        assert row["mismatch/plain"] < 1e-4
        assert row["mismatch/abs"] < 1e-4
    saved = {name for name in checkpoint_tensors(copied.folder) if name.startswith("model.")}
    assert saved == {f"model.{name}" for name in changed}


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> TrainingRun:
    return train(tmp_path_factory.mktemp("shared"), one_block("shared"))


@pytest.mark.parametrize(("weights", "ranks"), [("shared", 1), ("copied", 2)])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(copied, shared, tmp_path, weights, ranks):
    whole = {"shared": shared, "copied": copied}[weights]
    assert_resumes_exactly(whole, tmp_path, one_block(weights), first_step=STEPS - 1, ranks=ranks)


def test_shared_weights_change_the_same_block_to_nearly_the_same_values(copied, shared):
    one, two = (load_file(run.folder / "final_model/model.safetensors") for run in (shared, copied))
    base = load_file(tiny_model() / "model.safetensors")
    for name, tensor in base.items():
        if name.startswith(TRAINED):
            assert (one[name] - tensor.float()).abs().max() > 1e-3
            torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(one[name], two[name])


@pytest.mark.parametrize(("layers", "text"), [("0", "0"), (None, "null")])
def test_resuming_with_other_blocks_ends_in_one_line(shared, tmp_path, layers, text):
    copy = shutil.copytree(shared.folder, tmp_path / "run")
    with ForkedRun(tmp_path, one_block("shared", train_layers=layers), "--resume", str(copy)) as run:
        assert run.wait() == 2, run.tail()
        [refusal] = run.stderr.splitlines()
    checkpoint = f"{copy}/checkpoints/step_{STEPS:06d}"
    rule = "resume with the value that the run began with"
    assert refusal == f"error: policy.train_layers={text}: the checkpoint {checkpoint} has 1; {rule}"
