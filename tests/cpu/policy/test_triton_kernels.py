"""The Triton kernels of a training step equal plain torch, in Triton's interpreter on CPU."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from tests.support.interpreter import interpreted

pytest.importorskip("triton")

COMPARISON = """
import torch
from colocated_grpo.policy import logprobs
from colocated_grpo.policy.attention import _sum_keys
from colocated_grpo.runtime import logit_kernels, row_kernels

logit_kernels.BLOCK = row_kernels.WIDEST_SUM = 64  # several blocks per row, the last one partial
logit_kernels.LANES, logit_kernels.DRAWS = 16, 2  # several parts per row, the last draw partial
torch.manual_seed(0)
rows, vocabulary = 5, 333
logits = torch.randn(rows, vocabulary) * 6
logits[0, 7], logits[1, 300] = 60.0, -200.0  # extremes at which a naive exponential overflows
targets = torch.tensor([7, 300, 0, vocabulary - 1, 64])
temperatures = torch.tensor([0.7, 1.0, 1.3, 1.0, 2.0])
gradients = torch.randn(rows)

plain = logprobs.plain_row_statistics(logits, targets, temperatures)
fast = logit_kernels.row_statistics(logits, targets, temperatures)
for expected, actual in zip(plain, fast, strict=True):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
# The log-probability of a sampled token has the same bits, also if the logits were divided before.
draw = torch.arange(rows), temperatures, torch.arange(rows), torch.full((rows,), 7)
for tokens, logprobs_B in (
    logit_kernels.sample(logits, *draw, divide=True),
    logit_kernels.sample(logits / temperatures[:, None], *draw),
):
    assert torch.equal(logit_kernels.row_statistics(logits, tokens, temperatures)[0], logprobs_B)
for softcap in (None, 70.0):
    arguments = (targets, temperatures, plain[2], gradients), torch.float32, softcap
    expected = logprobs.plain_logit_gradient(logits, *arguments)
    actual = logit_kernels.logit_gradient(logits.clone(), *arguments)  # it overwrites the logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)

# Row 0 has one key, row 1 four, row 2 none, row 3 two; the eighth key belongs to no row.
keys, starts = torch.tensor([3, 0, 5, 1, 6, 2, 4, 7]), torch.tensor([0, 1, 5, 5, 7, 99, 99, 99, 99])
for shape in ((8, 3, 40), (8, 1, 64)):  # 120 numbers are one block and a part of another
    gradients = torch.randn(shape)
    expected = torch.stack([gradients[keys[starts[row] : starts[row + 1]]].sum(0) for row in range(4)])
    torch.testing.assert_close(row_kernels.sum_keys(gradients, keys, starts, 4), expected)
    torch.testing.assert_close(_sum_keys(gradients[:7], keys[:7], starts, 4), expected)  # on CPUs all keys have a row
print("equal")
"""


def test_the_kernels_equal_plain_torch():
    assert interpreted("-c", COMPARISON).strip() == "equal"


def test_products_choose_the_tiles_of_the_measurement_which_are_nearly_the_fastest():
    from colocated_grpo.runtime.row_kernels import _fastest_tile

    processors = 132  # of an H200
    measured = json.loads(Path("docs/results/row_products_1xh200.json").read_text())["products"]
    for product in measured:
        assert list(_fastest_tile(product["rows"], product["columns"], processors)) == product["chosen"]["tile"]
    slowdowns = [product["chosen"]["us"] / product["fastest_us"] for product in measured if product["chosen"]["us"]]
    assert len(slowdowns) > 100
    assert mean(slowdowns) < 1.03
