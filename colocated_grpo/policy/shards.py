"""Allocate the parameters of a model, and read this rank's rows of them from a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from colocated_grpo.policy.checkpoint_files import CheckpointReader
from colocated_grpo.policy.model import PackedLM
from colocated_grpo.runtime.distributed import local_part
from colocated_grpo.settings.errors import ConfigError


def load_shards(model: PackedLM, folder: Path, device: torch.device, *, offloaded: bool) -> None:
    """Allocate the parameters and read this rank's rows from the checkpoint in `folder`.

    device: where the model computes. offloaded: parameters stay in host memory between uses (FSDP2 CPU offload).
    """
    _allocate(model, torch.device("cpu") if offloaded else device, device)
    read_parameters(model.hf_parameters(), model.lm.base_model_prefix, folder)


@torch.no_grad()
def read_parameters(parameters: Mapping[str, Tensor], prefix: str, folder: Path) -> None:
    """Read parameters or buffers from the checkpoint in `folder`; only this rank's rows if they are sharded.

    prefix: prefix of the base model's names, such as "model". Names in the checkpoint may have or lack this prefix.
    Raises ConfigError if tensors are missing or have other shapes.
    """
    read_from(CheckpointReader(folder), parameters, prefix)


@torch.no_grad()
def read_from(reader: CheckpointReader, parameters: Mapping[str, Tensor], prefix: str) -> None:
    """Read parameters from an open reader. Raises ConfigError as `read_parameters` does."""
    for name, source in stored_names(reader, parameters, prefix).items():
        _fill(parameters[name], reader, source)


def stored_names(reader: CheckpointReader, parameters: Mapping[str, Tensor], prefix: str) -> dict[str, str]:
    """Return each parameter's name in the checkpoint. Reads no values. Raises ConfigError as `read_parameters` does.

    The parameters may be on the meta device.
    """
    names = reader.names()
    prefix += "."
    found, missing = {}, []
    for name, parameter in parameters.items():
        source = next((n for n in (name, name.removeprefix(prefix), prefix + name) if n in names), None)
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


def _allocate(model: PackedLM, parameters_on: torch.device, buffers_on: torch.device) -> None:
    """Allocate parameters and move buffers; `to_empty` alone would lose the values of the buffers."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=parameters_on)
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(buffers_on)


def _fill(parameter: Tensor, reader: CheckpointReader, source: str) -> None:
    local = local_part(parameter)
    start, rows = 0, local.shape[0]
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        start, rows = offset[0], shape[0]
    if rows:
        reader.read_into(local[:rows], source, start)
        if not local[:rows].isfinite().all():
            raise ConfigError(
                f"model.name={str(reader.folder)!r}: {source!r} has NaN or infinite values; the checkpoint is damaged"
            )
