"""The varlen kernel that CUDA devices run, against the padded path that the CPU tests have proved exact."""

from __future__ import annotations

import pytest
import torch

from colocated_grpo.policy.attention import _attend_padded, _attend_varlen

pytestmark = pytest.mark.gpu

LENGTHS = [37, 1, 300, 128, 5]
HEADS, HEAD_DIM = 8, 64
ROUNDINGS = 2**-7
"""Two of bfloat16's, relative: the kernel rounds a key's gradient for each query head and again for their sum."""


@pytest.mark.parametrize("window", [None, 2, 16])
@pytest.mark.parametrize("scaling", [None, 0.2])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_the_varlen_kernel_equals_padded_attention_in_value_and_gradients(kv_heads, scaling, window):
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(1, count, sum(LENGTHS), HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=generator)
        for count in (HEADS, kv_heads, kv_heads)
    )
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    upstream = torch.randn(1, sum(LENGTHS), HEADS, HEAD_DIM, device="cuda", generator=generator)

    def run(attend, dtype):
        tensors = [tensor.to(dtype).detach().requires_grad_() for tensor in (query, key, value)]
        out = attend(*tensors, cu, max(LENGTHS), scaling, window)
        return [out.detach(), *torch.autograd.grad((out.float() * upstream).sum(), tensors)]

    exact = run(_attend_padded, torch.float64)
    padded = run(_attend_padded, torch.bfloat16)
    varlen = run(_attend_varlen, torch.bfloat16)
    for name, a, b, c in zip(("output", "query", "key", "value"), varlen, padded, exact, strict=True):
        error, usual = ((tensor.double() - c).norm() / c.norm() for tensor in (a, b))
        assert error < max(2 * usual, ROUNDINGS), f"{name}: relative error {error:.2e}, padded bf16 has {usual:.2e}"
