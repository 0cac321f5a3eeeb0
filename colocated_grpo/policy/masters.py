"""The fp32 master weights that the optimizer updates, and the weights that the model computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from colocated_grpo.policy.model import PackedLM, read_parameters, reshard


class Weights(Protocol):
    """A model and its master weights. Every method is collective."""

    model: PackedLM

    def masters(self) -> dict[str, nn.Parameter]:
        """Return the masters by checkpoint name, in the same order on every rank; their gradients are fp32 as well."""
        ...

    def before_forward(self, *, last: bool) -> None:
        """Call before each micro-batch of a minibatch. last: an optimizer step follows this micro-batch."""
        ...

    def release(self) -> None:
        """Free all weights except the masters. Call after a minibatch, or a forward pass without a backward pass."""
        ...

    def publish(self) -> None:
        """Make the model compute with the current masters. Call whenever they have changed."""
        ...


class ShardedWeights:
    """FSDP2: the model's own parameters are the masters, sharded by rows over ranks and gathered for each use."""

    def __init__(self, model: PackedLM) -> None:
        self.model = model

    def masters(self) -> dict[str, nn.Parameter]:
        return self.model.hf_parameters()

    def before_forward(self, *, last: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        # Gradients accumulate unsharded and are reduced once: micro-batches add no communication.
        self.model.set_requires_gradient_sync(last)

    def release(self) -> None:
        reshard(self.model)

    def publish(self) -> None:
        """Do nothing: the next forward pass gathers the new values."""


class UnshardedWeights:
    """One rank without FSDP: fp32 masters beside a plain model with parameters in the compute type.

    Device memory per parameter: 4 bytes for the master, 4 for its gradient during a minibatch, and one value of the
    compute type. The model's parameters may be the engine's tensors (see `adopt`): `publish` is then the entire weight
    sync.
    """

    def __init__(self, model: PackedLM, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """model: without storage, as `build_empty` returns it. dtype: the compute type."""
        self.model = model
        self._masters = {
            name: nn.Parameter(torch.empty(parameter.shape, device=device))
            for name, parameter in model.hf_parameters().items()
        }
        read_parameters(self._masters, model.lm.base_model_prefix, folder)
        _allocate(model, device, dtype)
        for name, parameter in model.hf_parameters().items():
            parameter.register_post_accumulate_grad_hook(_accumulate_into(self._masters[name]))
        self.publish()

    def masters(self) -> dict[str, nn.Parameter]:
        return self._masters

    def before_forward(self, *, last: bool) -> None:
        """Do nothing: each micro-batch's gradient is added to the masters' during the backward pass."""

    def release(self) -> None:
        """Do nothing: nothing was gathered."""

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the masters into the model's parameters."""
        targets = [parameter.data for parameter in self.model.hf_parameters().values()]
        torch._foreach_copy_(targets, [master.data for master in self._masters.values()])

    def adopt(self, views: Mapping[str, Tensor]) -> bool:
        """Use these tensors, by checkpoint name, as the model's parameters and free the previous ones.

        Return False and change nothing unless each has the shape, type and device of its parameter.
        """
        parameters = self.model.hf_parameters()
        if any(_kind(views[name]) != _kind(parameter) for name, parameter in parameters.items()):
            return False
        for name, parameter in parameters.items():
            parameter.data = views[name]  # the Parameter object stays, with its hook and its ties
        self.publish()
        return True


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _allocate(model: PackedLM, device: torch.device, dtype: torch.dtype) -> None:
    """Replace meta parameters by allocated ones, keeping ties, and move buffers."""
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, meta in list(module.named_parameters(recurse=False)):
            if meta not in allocated:
                allocated[meta] = nn.Parameter(torch.empty(meta.shape, device=device, dtype=dtype))
            setattr(module, name, allocated[meta])
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _accumulate_into(master: nn.Parameter) -> Callable[[Tensor], None]:
    """Return a hook that moves a parameter's gradient to its master during the backward pass.

    Gradients of micro-batches are summed in fp32, because a 16-bit sum would drop small addends. Each 16-bit gradient
    is freed as soon as its layer is done.
    """

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
