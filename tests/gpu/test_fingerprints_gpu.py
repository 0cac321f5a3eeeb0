"""Fingerprints on a CUDA device equal those of the CPU, casts to 16 bits and uploads from host memory included."""

from __future__ import annotations

import pytest
import torch

from colocated_grpo.weights.fingerprints import Part, columns_of, fingerprint, rows_of
from colocated_grpo.weights.transport import Fingerprints

DEVICE = torch.device("cuda")


def parts() -> list[Part]:
    generator = torch.Generator().manual_seed(0)
    single = torch.randn(300, 301, generator=generator)
    half = torch.randn(64, 1024, generator=generator).bfloat16()
    return [
        rows_of(single, 0),
        rows_of(single[100:], 100),
        columns_of(single[:, 7:100].contiguous(), 7, 301),
        rows_of(half, 3),
        columns_of(half, 1024, 4096),
        rows_of(torch.randn(577, generator=generator), 0),
        rows_of(torch.randn(40_000, 64, generator=generator), 8),
        rows_of(single[:0], 300),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_agrees_with_the_cpu(dtype):
    on_device = [part._replace(values=part.values.to(DEVICE)) for part in parts()]
    expected = [int(fingerprint(part, dtype)) for part in parts()]
    assert Fingerprints(on_device, dtype, DEVICE).compute().tolist() == expected
    assert Fingerprints(parts(), dtype, DEVICE).compute().tolist() == expected, "in host memory"
