"""Micro-batches split over two devices train as whole ones: compiled blocks, FlashAttention, bfloat16."""

from __future__ import annotations

import pytest

from benchmarks.workload import MAX_PROMPT_TOKENS, TASK
from colocated_grpo.tracking import files
from tests.support.training_runs import launch, settings, tiny_model


def first_step(folder, context_parallel: int) -> files.Row:
    config = settings(
        tiny_model(head_dim=64),
        environments=[{"type": "task", "name": TASK}],  # rewards differ at once, so that every step moves the weights
        rollout={"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_completion_tokens": 256, "group_size": 8},
        policy={"context_parallel": context_parallel, "compile": True},
        loss={"type": "gspo"},
        deterministic=True,
        training_steps=2,
        evaluation={"every": 0},
    )
    first, second = launch(folder, config, gpus=2).rows(files.TRAIN)
    assert all(row["grad_norm"] > 0 and row["mismatch/plain"] < 0.02 for row in (first, second))
    return first


@pytest.mark.multigpu(2)
def test_two_devices_with_split_micro_batches_train_as_two_with_whole_ones(tmp_path):
    whole, split = (first_step(tmp_path / str(size), size) for size in (1, 2))
    for metric in ("grad_norm", "entropy"):
        assert split[metric] == pytest.approx(whole[metric], rel=1e-3)
    # A mean of squared rounding errors, which depend on the kernel.
    assert split["mismatch/kl"] == pytest.approx(whole["mismatch/kl"], rel=0.05)
