"""Each kernel that replaces one of vLLM's, and the steady scheduler, broken on purpose: the run stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faulty_runs import failed, faulty
from tests.support.training_runs import LaunchedRun, Settings, launch, tiny_model

pytestmark = pytest.mark.gpu

ENGINE = {"enforce_eager": False, "max_num_seqs": 64}
BATCH = {"prompts_per_step": 16, "group_size": 4, "max_completion_tokens": 24}
"""64 sequences: the decode attention kernel takes batches of 32 and more."""

DECODE_ATTENTION = """
from colocated_grpo.rollout.vllm import decode_attention
decode = decode_attention.decode
decode_attention.decode = lambda *arguments: decode(*arguments).neg_()
"""

QKV = """
from colocated_grpo.rollout.vllm import qkv_kernel
prepare = qkv_kernel.normalize_rotate_and_store
def broken(attention, qkv, positions, cache):
    decoding = len(qkv) <= 64  # not the prompts
    prepare(attention, qkv, positions + 5 * decoding, cache)
qkv_kernel.normalize_rotate_and_store = broken
"""

SAMPLING = """
from colocated_grpo.rollout.vllm import sampling_kernels
sample = sampling_kernels.sample
def broken(*arguments, **options):
    tokens, logprobs = sample(*arguments, **options)
    return tokens, logprobs - 0.5
sampling_kernels.sample = broken
"""

SCHEDULING = """
import numpy as np
from colocated_grpo.rollout.vllm.steady_batch import SteadyBatch
settle = SteadyBatch.settle
def broken(self, row, without=0):
    self._logprobs[row, : self._unsettled[row]] = np.roll(self._logprobs[row, : self._unsettled[row]], 1)
    settle(self, row, without)
SteadyBatch.settle = broken
"""


def run_settings(tmp_path: Path, fault: str) -> Settings:
    """Two steps of a model whose heads have a size that the kernels take."""
    return faulty(tmp_path, fault, tiny_model(head_dim=64), engine=ENGINE, rollout=BATCH, training_steps=2)


@pytest.mark.parametrize(
    "fault", [DECODE_ATTENTION, QKV, SAMPLING, SCHEDULING], ids=["attention", "qkv", "sampling", "scheduling"]
)
def test_a_broken_kernel_ends_the_run_with_both_numbers(tmp_path, fault):
    run = failed(LaunchedRun(tmp_path, run_settings(tmp_path, fault), gpus=1))
    line = run.stderr.splitlines()[-1]
    assert line.startswith(("error: mismatch/plain=", "error: mismatch/worst=")), run.tail()
    assert "freshness.max_mean_diff" in line


def test_the_same_run_without_a_fault_agrees(tmp_path):
    run = launch(tmp_path, run_settings(tmp_path, ""), gpus=1)
    assert all(row["mismatch/plain"] < 0.02 for row in run.rows("train") if "mismatch/plain" in row)
