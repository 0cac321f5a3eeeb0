"""Linear layers with an adapter.

The forward pass multiplies by the merged weight W = W0 + scale * left @ right. With a 4-bit base, each pass computes W.

Shapes: T tokens, I input features, O output features, R rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from colocated_grpo.policy.lora import nf4
from colocated_grpo.policy.lora.dither import dithered

FACTORS = ("lora_A", "lora_B")
"""Names of the factors' parameters, as in PEFT."""
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x, weight_OI, bias_O) -> x @ weight.T + bias. Without gradients of its own."""


class AdaptedLinear(nn.Module):
    """y = x W^T + bias with a frozen, merged W = W0 + scale * B A. Replaces a layer with a type in ADAPTED.

    Gradients go to lora_A [R, I] and lora_B [O, R], which are float32 and replicated on every rank. The parameters
    `weight` and `bias` are taken from the replaced layer. The factors are allocated by `AdapterWeights`.

    With W0 in 4 bits, `packed` takes the place of `weight`, and each forward and backward pass computes W. A layer
    without an adapter has rank 0.
    """

    weight: nn.Parameter
    packed: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Module, rank: int, scale: float, *, in_4_bits: bool = False) -> None:
        """layer: has parameters on the meta device. in_4_bits: see `nf4`."""
        super().__init__()
        weight = layer.get_parameter("weight")
        self.in_4_bits = in_4_bits
        self.compute_dtype = weight.dtype
        if in_4_bits:
            stored = weight.shape[0], weight.shape[1] // nf4.BLOCK * nf4.STORED
            self.packed = nn.Parameter(weight.new_empty(stored, dtype=torch.float32), requires_grad=False)
        else:
            self.weight = weight
        self.bias = None if getattr(layer, "bias", None) is None else layer.get_parameter("bias")
        self.scale = scale
        self.key = torch.tensor(0)
        """Selects the dither. A tensor, because an int is a constant of a graph: every block would be compiled."""
        self.multiply: Multiply = functional.linear
        self.is_transposed = isinstance(layer, Conv1D)
        """True if the weight is stored as [I, O], as in GPT-2."""
        outputs, inputs = reversed(weight.shape) if self.is_transposed else weight.shape
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, device="meta"), requires_grad=rank > 0)
        self.lora_B = nn.Parameter(torch.empty(outputs, rank, device="meta"), requires_grad=rank > 0)

    def forward(self, x: Tensor) -> Tensor:
        factors, key = (self.lora_A, self.lora_B), self.key if self.in_4_bits else None
        return _merged_linear(x, self.base(), self.bias, *factors, key, self.is_transposed, self.scale, self.multiply)

    def base(self) -> nn.Parameter:
        """Return `packed` (W0 in 4 bits) or `weight` (W)."""
        return self.packed if self.in_4_bits else self.weight


ADAPTED = (nn.Linear, Conv1D)
"""Types of layers that can have an adapter."""


def is_factor(name: str) -> bool:
    """Return True if the parameter of this name is a factor of an adapter."""
    return name.rpartition(".")[2] in FACTORS


class _MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        base: Tensor,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        key: Tensor | None,
        is_transposed: bool,
        scale: float,
        multiply: Multiply,
    ) -> Tensor:
        # Without an adapter, the backward pass does not need the input.
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, base, a_RI, b_OR, key)
        ctx.scale, ctx.is_transposed = scale, is_transposed
        return multiply(x, _matrix(base, a_RI, b_OR, key, is_transposed, scale, x), bias_O)

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, base, a_RI, b_OR, key = ctx.saved_tensors
        grad_x = grad_a_RI = grad_b_OR = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ _matrix(base, a_RI, b_OR, key, ctx.is_transposed, ctx.scale, grad)
        if x is not None:
            x_TI, grad_TO = x.flatten(0, -2), grad.flatten(0, -2)
            # Multiply with the [R, I] and [O, R] factors first, so that the adapter needs no [O, I] or [T, O] tensor.
            a_TR = x_TI @ a_RI.to(x.dtype).t()
            b_TR = grad_TO @ b_OR.to(x.dtype)
            grad_a_RI = (b_TR.t() @ x_TI).to(a_RI.dtype) * ctx.scale
            grad_b_OR = (grad_TO.t() @ a_TR).to(b_OR.dtype) * ctx.scale
        return grad_x, None, None, grad_a_RI, grad_b_OR, None, None, None, None


_merged_linear = _MergedLinear.apply


def _matrix(
    base: Tensor, a_RI: Tensor, b_OR: Tensor, key: Tensor | None, is_transposed: bool, scale: float, after: Tensor
) -> Tensor:
    """Return the merged weight as [O, I]. base: itself merged if `key` is None, otherwise in 4 bits."""
    if key is not None:
        base = merged(base, *product(a_RI, b_OR, is_transposed), scale, key, 0, after)
    return base.t() if is_transposed else base


def product(a_RI: Tensor, b_OR: Tensor, is_transposed: bool) -> tuple[Tensor, Tensor]:
    """Return (left, right) such that left @ right has the layout of the stored weight."""
    return (a_RI.t(), b_OR.t()) if is_transposed else (b_OR, a_RI)


@torch.library.custom_op("colocated_grpo::merged", mutates_args=())
def merged(packed: Tensor, left: Tensor, right: Tensor, scale: float, key: Tensor, first: int, after: Tensor) -> Tensor:
    """Return base + scale * left @ right in the type of `after`, for a 4-bit base. Other arguments: see `merge`.

    A custom operator, opaque to torch.compile, so that training and weight sync compute identical bytes.
    after: a tensor of the calling pass, of which only the type is read. It keeps the compiler from saving the forward
    pass's weights for the backward pass.
    """
    weight = nf4.unpack(packed, after.dtype)
    merge(weight, weight, left, right, scale, key, first)
    return weight


@merged.register_fake
def _(packed: Tensor, left: Tensor, right: Tensor, scale: float, key: Tensor, first: int, after: Tensor) -> Tensor:
    return after.new_empty(len(packed), nf4.weight_columns(packed))


def merge(
    out: Tensor, base: Tensor, left: Tensor, right: Tensor, scale: float, key: Tensor | int, first: int = 0
) -> None:
    """Write base + scale * left @ right into `out`, which may be `base`.

    out, base: [rows, columns] of one type, bfloat16 or float32, with contiguous rows. left: [rows, rank] and right:
    [rank, columns], float32. key: selects the dither. first: index of out[0, 0] in the whole weight, counted by rows.
    """
    if out.is_cuda:
        from colocated_grpo.policy.lora.merge_kernel import merge as merge_on_gpu  # needs Triton

        merge_on_gpu(out, base, left, right, scale, int(key), first)
        return
    exact = torch.addmm(base.float(), left, right, alpha=scale)
    out.copy_(exact if out.dtype == torch.float32 else dithered(exact, int(key), first))
