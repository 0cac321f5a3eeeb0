"""Weights of a model on this rank: fp32 masters that the optimizer updates, and those that the model computes with.

Both are allocated, and this rank's rows read, from a checkpoint.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from colocated_grpo.errors import ConfigError
from colocated_grpo.policy.checkpoint_files import CheckpointReader
from colocated_grpo.policy.lora.linear import is_factor
from colocated_grpo.policy.model import PackedLM, reshard
from colocated_grpo.runtime.distributed import first_row, local_part


class Weights:
    """A model and its master weights. Every method is collective; the last four do nothing by default."""

    model: PackedLM

    def masters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name, in the same order on every rank. Parameters and gradients are fp32."""
        raise NotImplementedError

    def published(self) -> Mapping[str, Tensor]:
        """Return all weights of the model by checkpoint name, including frozen weights, for syncs and exports."""
        raise NotImplementedError

    def before_forward(self, *, last: bool) -> None:
        """Call before each micro-batch of a minibatch. last: an optimizer step follows this micro-batch."""

    def reduce_gradients(self) -> None:
        """Sum gradients over ranks where the backward pass has not done so. Call after a minibatch's micro-batches."""

    def release(self) -> None:
        """Free all gathered weights. Call after a minibatch, or a forward pass without a backward pass."""

    def publish(self) -> None:
        """Make the model compute with the current masters. Call whenever the masters have changed."""


Reference = Callable[[], AbstractContextManager[Weights]]
"""Returns a context with the weights that score batches for the KL penalty. Collective; no training inside it."""


class ShardedWeights(Weights):
    """FSDP2: the model's own parameters are the masters, sharded by rows over ranks and gathered for each use.

    Frozen parameters are sharded in the compute type.
    """

    def __init__(self, model: PackedLM) -> None:
        self.model = model

    def masters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.model.hf_parameters().items() if parameter.requires_grad}

    def published(self) -> dict[str, nn.Parameter]:
        return self.model.hf_parameters()

    def before_forward(self, *, last: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        # Gradients accumulate unsharded and are reduced once: micro-batches add no communication.
        self.model.set_requires_gradient_sync(last)

    def release(self) -> None:
        reshard(self.model)


class UnshardedWeights(Weights):
    """One rank without FSDP: fp32 masters beside a plain model with parameters in the compute type.

    Device memory per trained parameter: 4 bytes for the master, 4 for its gradient during a minibatch, and one value of
    the compute type; per frozen parameter, only the value of the compute type. The model's parameters may be the
    engine's tensors (see `adopt`): `publish` is then the entire weight sync.
    """

    def __init__(self, model: PackedLM, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """model: without storage, as `build_empty` returns it. dtype: the compute type."""
        self.model = model
        self._masters = {
            name: nn.Parameter(torch.empty(parameter.shape, device=device))
            for name, parameter in model.hf_parameters().items()
            if parameter.requires_grad
        }
        reader, prefix = CheckpointReader(folder), model.lm.base_model_prefix
        read_parameters(reader, self._masters, prefix)
        allocate(model, device, dtype)
        self._trained = {name: p for name, p in model.hf_parameters().items() if name in self._masters}
        read_parameters(reader, {n: p for n, p in model.hf_parameters().items() if n not in self._trained}, prefix)
        for name, parameter in self._trained.items():
            parameter.register_post_accumulate_grad_hook(_accumulate_into(self._masters[name]))
        self.publish()

    def masters(self) -> dict[str, nn.Parameter]:
        return self._masters

    def published(self) -> dict[str, nn.Parameter]:
        """Return the masters, which are exact, and the model's frozen parameters."""
        return {name: self._masters.get(name, p) for name, p in self.model.hf_parameters().items()}

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the masters into the model's parameters."""
        targets = [parameter.data for parameter in self._trained.values()]
        torch._foreach_copy_(targets, [master.data for master in self._masters.values()])


@torch.no_grad()
def adopt(model: PackedLM, views: Mapping[str, Tensor]) -> bool:
    """Use `views`, by checkpoint name, as the parameters of an unsharded model, and free its previous tensors.

    The parameters keep their values. Returns False and changes nothing unless `views` has a tensor of the same shape,
    type and device for each parameter.
    """
    parameters = model.hf_parameters()
    if any(name not in views or _kind(views[name]) != _kind(p) for name, p in parameters.items()):
        return False
    for name, parameter in parameters.items():
        views[name].copy_(parameter)
        parameter.data = views[name]  # the Parameter object stays, with its hook and its ties
    return True


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def allocate(model: PackedLM, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Replace meta parameters, except the factors of adapters, by allocated parameters; move buffers.

    dtype: of all parameters; None keeps their types. Tied parameters stay tied.
    """
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, meta in list(module.named_parameters(recurse=False)):
            if is_factor(name):
                continue
            if meta not in allocated:
                values = torch.empty(meta.shape, device=device, dtype=dtype or meta.dtype)
                allocated[meta] = nn.Parameter(values, requires_grad=meta.requires_grad)
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


def load_shards(model: PackedLM, folder: Path, device: torch.device, *, offloaded: bool) -> None:
    """Allocate the parameters and read this rank's rows from the checkpoint in `folder`.

    device: where the model computes. offloaded: parameters stay in host memory between uses (FSDP2 CPU offload).
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # `to_empty` loses their values
    model.to_empty(device="cpu" if offloaded else device)
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(device)
    read_parameters(CheckpointReader(folder), model.hf_parameters(), model.lm.base_model_prefix)


@torch.no_grad()
def read_parameters(reader: CheckpointReader, parameters: Mapping[str, Tensor], prefix: str) -> None:
    """Read parameters or buffers from the reader's checkpoint; only this rank's rows if they are sharded.

    prefix: prefix of the base model's names, such as "model". Names in the checkpoint may have or lack this prefix.
    Raises ConfigError if tensors are missing or have other shapes.
    """
    for name, source in stored_names(reader, parameters, prefix).items():
        rows = local_part(parameters[name])
        if not len(rows):
            continue
        reader.read_into(rows, source, first_row(parameters[name]))
        if not rows.isfinite().all():
            raise ConfigError(
                f"model.name={str(reader.folder)!r}: {source!r} has NaN or infinite values; the checkpoint is damaged"
            )


def stored_names(reader: CheckpointReader, parameters: Mapping[str, Tensor], prefix: str) -> dict[str, str]:
    """Return each parameter's name in the checkpoint. Reads no values. Raises ConfigError as `read_parameters` does.

    The parameters may be on the meta device.
    """
    prefix += "."
    found, missing = {}, []
    for name, parameter in parameters.items():
        source = next((n for n in (name, name.removeprefix(prefix), prefix + name) if n in reader.shapes), None)
        if source is None:
            missing.append(name)
        elif reader.shapes[source] != parameter.shape:
            raise ConfigError(
                f"model.name={str(reader.folder)!r}: {source!r} has shape {list(reader.shapes[source])} in the "
                f"checkpoint, and {list(parameter.shape)} by config.json"
            )
        else:
            found[name] = source
    if missing:
        raise ConfigError(
            f"model.name={str(reader.folder)!r}: the checkpoint lacks {len(missing)} tensors, first {missing[0]!r}"
        )
    return found
