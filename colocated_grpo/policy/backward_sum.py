"""Statistics that transformer blocks add up while they run backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class BackwardSum:
    """Sum of the values that forward passes contribute, added in their backward passes.

    A checkpointed block, which runs forward twice, counts once. Compiled blocks contribute too: they change no state,
    because the sum is the gradient of a tensor.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._total = torch.zeros(size, device=device, requires_grad=True)

    def reset(self) -> None:
        self._total.grad = None

    def attach(self, carrier: Tensor, values: Tensor) -> Tensor:
        """Return `carrier`, whose backward pass adds `values` [size] to the sum."""
        return _Adds.apply(carrier, values, self._total)

    def values(self) -> Tensor:
        """Return the sum [size] float32; zeros after a reset."""
        return torch.zeros_like(self._total.detach()) if self._total.grad is None else self._total.grad


class _Adds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, values: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return carrier.view_as(carrier)

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs; one argument per output is what it passes)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        (values,) = ctx.saved_tensors
        return grad, None, values
