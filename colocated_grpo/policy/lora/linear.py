"""Linear layers with an adapter, and the rounding of their merged weights to bfloat16.

The forward pass uses the merged weight W = W0 + scale * left @ right, only the backward pass uses the factors.

Rounding to nearest would lose the adapter wherever it changes a weight by less than half a step of bfloat16, which
early in training is nearly everywhere. A fixed dither rounds away from zero with the probability that makes the
expected value exact. Its random numbers depend only on the weight's key and the element's index: W is exactly W0
while the adapter is zero, weights do not jitter from step to step, and a resumed run has the same bytes.

Shapes: T tokens, I input features, O output features, R rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

FACTORS = ("lora_A", "lora_B")
"""Names of the factors' parameters, as in PEFT."""
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x, weight_OI, bias_O) -> x @ weight.T + bias. Without gradients of its own."""


class AdaptedLinear(nn.Module):
    """y = x W^T + bias with a frozen, merged W = W0 + scale * B A.

    Gradients go to lora_A [R, I] and lora_B [O, R], which are float32 and replicated on every rank. The parameters
    `weight` and `bias` are taken from the replaced layer. The factors are allocated by `AdapterWeights`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Module, rank: int, scale: float) -> None:
        """layer: has a type in ADAPTED, and parameters on the meta device."""
        super().__init__()
        self.weight = layer.get_parameter("weight")
        self.bias = None if getattr(layer, "bias", None) is None else layer.get_parameter("bias")
        self.scale = scale
        self.multiply: Multiply = functional.linear
        outputs, inputs = self.matrix().shape
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, device="meta"))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return _merged_linear(x, self.matrix(), self.bias, self.lora_A, self.lora_B, self.scale, self.multiply)

    def matrix(self) -> Tensor:
        """Return the weight as [O, I]."""
        return self.weight

    @staticmethod
    def product(a_RI: Tensor, b_OR: Tensor) -> tuple[Tensor, Tensor]:
        """Return (left, right) such that left @ right has the layout of `weight`."""
        return b_OR, a_RI


class AdaptedConv1D(AdaptedLinear):
    """`AdaptedLinear` for transformers' Conv1D (GPT-2), which stores the weight as [I, O]."""

    def matrix(self) -> Tensor:
        return self.weight.t()

    @staticmethod
    def product(a_RI: Tensor, b_OR: Tensor) -> tuple[Tensor, Tensor]:
        return a_RI.t(), b_OR.t()


ADAPTED: dict[type[nn.Module], type[AdaptedLinear]] = {nn.Linear: AdaptedLinear, Conv1D: AdaptedConv1D}
"""Layers that can have an adapter, and their replacements."""


def is_factor(name: str) -> bool:
    """Return True if the parameter of this name is a factor of an adapter."""
    return name.rpartition(".")[2] in FACTORS


class _MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scale: float,
        multiply: Multiply,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI, a_RI, b_OR)
        ctx.scale = scale
        return multiply(x, weight_OI, bias_O)

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, a_RI, b_OR = ctx.saved_tensors
        grad_x = grad @ weight_OI if ctx.needs_input_grad[0] else None
        x_TI, grad_TO = x.flatten(0, -2), grad.flatten(0, -2)
        # Multiply with the [R, I] and [O, R] factors first, so that the adapter needs no [O, I] or [T, O] tensor.
        a_TR = x_TI @ a_RI.to(x.dtype).t()
        b_TR = grad_TO @ b_OR.to(x.dtype)
        grad_a_RI = (b_TR.t() @ x_TI).to(a_RI.dtype) * ctx.scale
        grad_b_OR = (grad_TO.t() @ a_TR).to(b_OR.dtype) * ctx.scale
        return grad_x, None, None, grad_a_RI, grad_b_OR, None, None


_merged_linear = _MergedLinear.apply


MIX = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
"""Multipliers of the hash; the last two are those of "lowbias32" (Ellis, prospecting for hash functions, 2018)."""
_MASK = 0xFFFFFFFF


def dithered(exact: Tensor, key: int, first: int = 0) -> Tensor:
    """Round float32 values to bfloat16: away from zero with the probability that makes the expected value exact.

    Values that bfloat16 represents exactly are returned unchanged.
    """
    # A bfloat16 is the upper half of a float32: a random lower half carries into it with the right probability.
    bits = exact.view(torch.int32) + random_16_bits(exact.numel(), key, first, exact.device).view(exact.shape)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


def random_16_bits(count: int, key: int, first: int, device: torch.device) -> Tensor:
    """Return uniform numbers below 2**16 for the elements first, first + 1, ...; [count] int32."""
    x = torch.arange(first, first + count, dtype=torch.int64, device=device) * MIX[0] + key & _MASK
    x = (x ^ (x >> 16)) * MIX[1] & _MASK
    x = (x ^ (x >> 15)) * MIX[2] & _MASK
    return ((x ^ (x >> 16)) >> 16).to(torch.int32)
