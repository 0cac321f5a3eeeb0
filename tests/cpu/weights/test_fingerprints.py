"""Fingerprints add up over parts, and change with every change of the bytes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colocated_grpo.weights.fingerprints import SPAN, SPANS, bits_of, columns_of, fingerprint, rows_of
from colocated_grpo.weights.transport import Fingerprints
from tests.support.interpreter import interpreted

MODULUS = 1 << 64
ROWS, COLUMNS = 300, 301
"""Twenty-two spans, and no multiple of one."""
ROOT = Path(__file__).parents[3]


def values(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def number(part, dtype: torch.dtype | None = torch.bfloat16) -> int:
    return int(fingerprint(part, dtype)) % MODULUS


def whole(tensor: Tensor, dtype: torch.dtype | None = torch.bfloat16) -> int:
    return number(rows_of(tensor, 0), dtype)


@given(st.lists(st.integers(0, ROWS), max_size=4))
def test_shards_of_any_size_add_up_to_the_whole(cuts):
    tensor, bounds = values(), [0, *sorted(cuts), ROWS]
    parts = [number(rows_of(tensor[a:b], a)) for a, b in pairwise(bounds)]
    assert sum(parts) % MODULUS == whole(tensor)


@given(st.integers(1, COLUMNS - 1))
def test_blocks_of_columns_add_up_to_the_whole(cut):
    tensor = values()
    parts = [number(columns_of(tensor[:, a:b].contiguous(), a, COLUMNS)) for a, b in ((0, cut), (cut, COLUMNS))]
    assert sum(parts) % MODULUS == whole(tensor)


def test_masters_are_cast_as_a_sync_casts_them():
    tensor = values()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert whole(tensor, dtype) == whole(tensor.to(dtype), None)
    assert whole(tensor, torch.bfloat16) != whole(tensor, torch.float16)


@given(st.integers(0, ROWS - 1), st.integers(0, COLUMNS - 1), st.integers(0, 15))
def test_any_single_bit_changes_the_fingerprint(row, column, bit):
    tensor = values().bfloat16()
    changed = tensor.clone()
    changed.view(torch.int16)[row, column] ^= torch.tensor(1 << bit).to(torch.int16)
    assert whole(changed, None) != whole(tensor, None)


def test_the_order_of_rows_and_of_spans_matters():
    tensor = torch.arange(4 * SPANS * SPAN, dtype=torch.float32).view(4, SPANS * SPAN)
    for order in ([1, 0, 2, 3], [0, 1, 3, 2], [3, 2, 1, 0]):
        assert whole(tensor[order], torch.float32) != whole(tensor, torch.float32)


def test_many_random_changes_are_all_seen():
    tensor, found = values().bfloat16(), set()
    generator = torch.Generator().manual_seed(1)
    for _ in range(500):
        steps = torch.randint(-1, 2, tensor.shape, generator=generator, dtype=torch.int16)
        found.add(whole((tensor.view(torch.int16) + steps).view(torch.bfloat16), None))
    assert len(found) == 500


def test_all_parts_are_computed_at_once_also_empty_ones_and_scalars():
    tensors = [values(), values()[:0], torch.randn(7), torch.tensor(2.0)]
    found = Fingerprints([rows_of(tensor, 0) for tensor in tensors], torch.bfloat16, torch.device("cpu")).compute()
    assert found.tolist() == [int(fingerprint(rows_of(tensor, 0), torch.bfloat16)) for tensor in tensors]
    assert found[1] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_memory_of_any_type_has_a_fingerprint(dtype):
    tensor = torch.arange(100).view(10, 10).to(dtype)
    changed = tensor.clone()
    changed.view(torch.uint8)[3, 3] ^= 1
    assert number(bits_of(changed), None) != number(bits_of(tensor), None)
    assert number(bits_of(tensor.t()), None) == number(bits_of(tensor.t().contiguous()), None)


IN_THE_INTERPRETER = """
import torch
from colocated_grpo.weights.fingerprint_kernel import plan_launches
from colocated_grpo.weights.fingerprints import columns_of, fingerprint, rows_of

torch.manual_seed(0)
single, half = torch.randn(300, 301), torch.randn(64, 1024).bfloat16()
parts = [
    rows_of(single, 0),
    rows_of(single[100:], 100),
    columns_of(single[:, 7:100].contiguous(), 7, 301),
    rows_of(half, 3),
    columns_of(half, 1024, 4096),
    rows_of(torch.randn(577), 0),
    rows_of(single[:0], 300),
]
for dtype in (None, torch.float32, torch.float16):
    sums = torch.zeros(len(parts), dtype=torch.int64)
    for launch in plan_launches(list(enumerate(parts)), dtype):
        launch(sums)
    assert sums.tolist() == [int(fingerprint(part, dtype)) for part in parts], dtype
"""


def test_the_kernel_computes_the_same_fingerprints():
    """Triton's interpreter truncates in casts to bfloat16."""
    assert not interpreted("-c", IN_THE_INTERPRETER)
