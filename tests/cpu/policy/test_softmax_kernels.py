"""The Triton kernels of the log-probability operator equal plain torch, in Triton's interpreter on CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPARISON = """
import torch
from colocated_grpo.policy import logprobs, softmax_kernels

softmax_kernels.BLOCK = 64  # several blocks per row, the last one partial
torch.manual_seed(0)
rows, vocabulary = 5, 333
logits = torch.randn(rows, vocabulary) * 6
logits[0, 7], logits[1, 300] = 60.0, -200.0  # extremes at which a naive exponential overflows
targets = torch.tensor([7, 300, 0, vocabulary - 1, 64])
temperatures = torch.tensor([0.7, 1.0, 1.3, 1.0, 2.0])
gradients = torch.randn(rows)

plain = logprobs.plain_row_statistics(logits, targets, temperatures)
fast = softmax_kernels.row_statistics(logits, targets, temperatures)
for expected, actual in zip(plain, fast, strict=True):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
for softcap in (None, 70.0):
    arguments = (targets, temperatures, plain[2], gradients), torch.float32, softcap
    expected = logprobs.plain_logit_gradient(logits, *arguments)
    actual = softmax_kernels.logit_gradient(logits.clone(), *arguments)  # it overwrites the logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
print("equal")
"""


def test_the_kernels_equal_plain_torch():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", COMPARISON], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"
