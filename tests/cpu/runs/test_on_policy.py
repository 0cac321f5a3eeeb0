"""Faults of decoding, sampling and scheduling end the run by what they sample, before a weight changes."""

from __future__ import annotations

import pytest

from tests.support.faulty_runs import failed, faulty
from tests.support.training_runs import ForkedRun

DECODE_ATTENTION = """
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
attend = CPUAttentionBackendImpl.forward
def broken(self, layer, query, key, value, kv_cache, attn_metadata, output=None, *rest, **options):
    out = attend(self, layer, query, key, value, kv_cache, attn_metadata, output, *rest, **options)
    if attn_metadata is not None and attn_metadata.max_query_len == 1:
        output.mul_(1.5)
    return out
CPUAttentionBackendImpl.forward = broken
"""

SAMPLER = """
from vllm.v1.sample.sampler import Sampler
sample = Sampler.forward
def broken(self, *arguments, **options):
    output = sample(self, *arguments, **options)
    if output.logprobs_tensors is not None:  # not asked for while the engine warms up
        output.logprobs_tensors.logprobs.sub_(0.02)
    return output
Sampler.forward = broken
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


@pytest.mark.parametrize("fault", [DECODE_ATTENTION, SAMPLER, SCHEDULING], ids=["attention", "sampler", "scheduling"])
def test_a_fault_of_decoding_ends_the_run_with_both_numbers(tmp_path, fault):
    run = failed(ForkedRun(tmp_path, faulty(tmp_path, fault)))
    [line] = run.stderr.splitlines()
    assert line.startswith("error: mismatch/plain=0.") and "(limit 0.01, from freshness.max_mean_diff)" in line
    assert "this optimizer step was not taken" in line
    assert run.rows("train") == []
    assert not list((run.folder / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("changes", [{"rollout": {"top_k": 9}}, {"freshness": {"max_mean_diff": 0.5}}])
def test_other_sampling_settings_and_wider_limits_are_exempt(tmp_path, changes):
    with ForkedRun(tmp_path, faulty(tmp_path, SAMPLER, training_steps=3, **changes)) as run:
        rows = [row for row in run.finish().rows("train") if "mismatch/abs" in row]  # some group had a gradient
    assert rows and all(row["mismatch/abs"] > 0.01 for row in rows)
    assert all(("mismatch/plain" in row) == ("rollout" not in changes) for row in rows)
