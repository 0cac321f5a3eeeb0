"""Who holds the fp32 master weights that the optimizer moves, and what the model computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from colocated_grpo.policy.model import PackedLM, free_gathered, read_parameters


class Weights(Protocol):
    """A model and its master weights. Every method is collective."""

    model: PackedLM

    def masters(self) -> dict[str, nn.Parameter]:
        """By checkpoint name, in the same order on every rank; their gradients are fp32 as well."""
        ...

    def before_forward(self, *, last: bool) -> None:
        """Before each micro-batch of a minibatch; `last`: an optimizer step follows this one."""
        ...

    def release(self) -> None:
        """After a minibatch, or a forward pass that no backward pass will follow: only the masters are left."""
        ...

    def publish(self) -> None:
        """Let the model compute with the masters as they are now. Call whenever they have changed."""
        ...


class ShardedWeights:
    """FSDP2: the model's own parameters are the masters, rows of them on each rank, gathered for each use."""

    def __init__(self, model: PackedLM) -> None:
        self.model = model

    def masters(self) -> dict[str, nn.Parameter]:
        return self.model.hf_parameters()

    def before_forward(self, *, last: bool) -> None:
        # Gradients add up unreduced and are reduced once: communication does not grow with micro-batches.
        self.model.set_requires_gradient_sync(last)

    def release(self) -> None:
        free_gathered(self.model)

    def publish(self) -> None:
        """Nothing to do: the next forward pass gathers anew."""


class WholeWeights:
    """One rank: masters beside the plain model, whose parameters have the type it computes in.

    Of each parameter the device holds 4 bytes of master, 4 of gradient while a minibatch is under way, and those of
    the compute type. The latter may lie in an engine's memory (`adopt`): to publish is then all there is to a sync.
    """

    def __init__(self, model: PackedLM, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """model: without storage."""
        self.model = model
        self._masters = {
            name: nn.Parameter(torch.empty(parameter.shape, device=device))
            for name, parameter in model.hf_parameters().items()
        }
        read_parameters(self._masters, model.lm.base_model_prefix, folder)
        _allocate(model, device, dtype)
        for name, parameter in model.hf_parameters().items():
            parameter.register_post_accumulate_grad_hook(_hand_over_to(self._masters[name]))
        self.publish()

    def masters(self) -> dict[str, nn.Parameter]:
        return self._masters

    def before_forward(self, *, last: bool) -> None:
        """Nothing to do: each micro-batch's gradient goes to the masters at once."""

    def release(self) -> None:
        """Nothing to do: nothing was gathered."""

    @torch.no_grad()
    def publish(self) -> None:
        computing = [parameter.data for parameter in self.model.hf_parameters().values()]
        torch._foreach_copy_(computing, [master.data for master in self._masters.values()])

    def adopt(self, views: Mapping[str, Tensor]) -> bool:
        """Compute with these tensors, by checkpoint name, from now on; what the model computed with is freed.

        False, and nothing has changed, unless each has the shape, type and device of its parameter.
        """
        parameters = self.model.hf_parameters()
        if any(_kind(views[name]) != _kind(parameter) for name, parameter in parameters.items()):
            return False
        for name, parameter in parameters.items():
            parameter.data = views[name]  # the parameter itself stays: its hook and its ties hold on
        self.publish()
        return True


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _allocate(model: PackedLM, device: torch.device, dtype: torch.dtype) -> None:
    """New parameters with storage in the place of those without, tied ones one and the same; buffers moved."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, empty in list(module.named_parameters(recurse=False)):
            if empty not in made:
                made[empty] = nn.Parameter(torch.empty(empty.shape, device=device, dtype=dtype))
            setattr(module, name, made[empty])
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _hand_over_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that moves a parameter's gradient to its master while backward goes on.

    Micro-batches add up in fp32: in 16 bits each would lose what is small beside the sum. And no 16-bit gradient
    outlives its layer.
    """

    def hook(parameter: Tensor) -> None:
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
