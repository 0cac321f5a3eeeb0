"""Statistics that transformer blocks accumulate during the backward pass."""

from typing import Any

import torch
from torch import Tensor


class BackwardSum:
    """Accumulates values of blocks during their backward pass.

    The sum is the gradient of a dummy leaf tensor, so a checkpointed block counts once although it runs forward twice,
    and a compiled block has no side effect.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._total = torch.zeros(size, device=device, requires_grad=True)

    def reset(self) -> None:
        self._total.grad = None

    def attach(self, value: Tensor, statistics: Tensor) -> Tensor:
        """Return `value` unchanged; its backward pass adds `statistics` [size] to the sum."""
        return with_gradient(value, self._total, statistics)

    def values(self) -> Tensor:
        """Return the sum [size] float32; zeros after a reset."""
        return torch.zeros_like(self._total.detach()) if self._total.grad is None else self._total.grad


def with_gradient(value: Tensor, target: Tensor, gradient: Tensor) -> Tensor:
    """Return `value` unchanged; its backward pass adds `gradient`, shaped like `target`, to `target`'s gradient."""
    return _WithGradient.apply(value, target, gradient)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, target: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.view_as(value)

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grad, gradient, None
