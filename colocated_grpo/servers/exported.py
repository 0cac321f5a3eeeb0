"""Weights shared by two processes: a server exports the engine's parameters, and a trainer uses the same memory.

On CUDA by CUDA IPC. On the CPU in anonymous shared memory, opened through the server's file descriptor.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from colocated_grpo.errors import RunError
from colocated_grpo.policy.masters import adopt
from colocated_grpo.policy.model import PackedLM
from colocated_grpo.tracking.files import write_atomically
from colocated_grpo.types import JsonObject

CONFIG_NAME = "vllm_bridge_config.json"
MAPPINGS = "param_mappings"
MEMORY_NAME = "colocated_grpo weights"
ALIGNMENT = 64
"""Alignment in bytes, because vector instructions of the CPU read whole cache lines."""


def export_folder() -> Path:
    """Return the folder of the exported file: $LOGDIR, else the working directory, as in Atropos' example server."""
    return Path(os.environ.get("LOGDIR") or ".")


def move_to_shared_memory(model: nn.Module) -> None:
    """Move a model's parameters on the CPU into memory that other processes can map. Tied parameters stay tied."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    offsets, total = {}, 0
    for pointer, storage in storages.items():
        offsets[pointer] = total
        total += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
    descriptor = os.memfd_create(MEMORY_NAME)
    os.ftruncate(descriptor, total)
    shared = _map(f"/proc/{os.getpid()}/fd/{descriptor}", total)
    for parameter in model.parameters():
        start = offsets[parameter.untyped_storage().data_ptr()] // parameter.element_size()
        view = _view(shared, parameter.dtype, start + parameter.storage_offset(), parameter.shape, parameter.stride())
        view.copy_(parameter.data)
        parameter.data = view


def export(views: Mapping[str, Tensor], facts: JsonObject, folder: Path) -> Path:
    """Write the file that locates the weights for a trainer, with further `facts`. Raises RunError.

    views: the engine's parameters by checkpoint name. Parameters on the CPU must be in shared memory.
    """
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views.values()}
    handles = {pointer: _handle(storage) for pointer, storage in storages.items()}
    mappings = {}
    for name, view in views.items():
        mappings[name] = {
            "handle": handles[view.untyped_storage().data_ptr()],
            "dtype": str(view.dtype).removeprefix("torch."),
            "shape": list(view.shape),
            "stride": list(view.stride()),
            "offset": view.storage_offset(),
        }
    file = folder / CONFIG_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({**facts, MAPPINGS: mappings}), mode=0o600)
    except OSError as error:
        problem = f"cannot write {CONFIG_NAME} ({error.strerror}); set LOGDIR to another folder"
        raise RunError(f"LOGDIR={str(folder)!r}: {problem}") from None
    return file


def _handle(storage: torch.UntypedStorage) -> JsonObject:
    if storage.device.type == "cuda":
        return {"cuda": [part.hex() if isinstance(part, bytes) else part for part in storage._share_cuda_()]}
    return {"file": storage.filename, "bytes": storage.nbytes()}


def attach(file: Path, instance: str) -> dict[str, Tensor]:
    """Return a server's parameters by checkpoint name. Raises RunError for another instance, or other memory."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["instance"] != instance:
            raise ValueError("another server, or another start of it, has written this file")
        storages: dict[str, torch.UntypedStorage] = {}
        return {name: _attached(entry, storages) for name, entry in content[MAPPINGS].items()}
    except FileNotFoundError as error:
        advice = f"start the server on this machine with --share-weights, and name its {CONFIG_NAME}"
        raise RunError(f"engine.bridge_config={file}: {error.filename or file} does not exist; {advice}") from None
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise RunError(f"engine.bridge_config={file}: not usable ({error}); start the server again") from None


def adopt_exported(views: Mapping[str, Tensor], model: PackedLM) -> dict[str, Tensor]:
    """Replace the parameters of the policy's model by a server's, and return these. Raises RunError on a mismatch.

    views: result of `attach`, whose names may lack the prefix of the base model. The result has both kinds of names.
    """
    start = f"{model.lm.base_model_prefix}."
    named = {alias: view for name, view in views.items() for alias in (name, name.removeprefix(start), start + name)}
    if not adopt(model, named):
        problem = "the server's weights have other names, shapes, types or devices than the policy's"
        advice = "start it with the run's model and --dtype, on the same device"
        raise RunError(f"engine.bridge=shared: {problem}; {advice}")
    return named


def _attached(entry: JsonObject, storages: dict[str, torch.UntypedStorage]) -> Tensor:
    handle = entry["handle"]
    if (key := json.dumps(handle)) not in storages:
        storages[key] = _open(handle)
    return _view(storages[key], getattr(torch, entry["dtype"]), entry["offset"], entry["shape"], entry["stride"])


def _open(handle: JsonObject) -> torch.UntypedStorage:
    if "cuda" in handle:
        parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle["cuda"]]
        return torch.UntypedStorage._new_shared_cuda(*parts)
    path, size = handle["file"], handle["bytes"]
    if not os.readlink(path).startswith(f"/memfd:{MEMORY_NAME}") or os.stat(path).st_size != size:
        raise ValueError(f"{path} does not hold the server's weights; it may have ended")
    return _map(path, size)


def _map(path: str, size: int) -> torch.UntypedStorage:
    return cast(torch.UntypedStorage, torch.UntypedStorage.from_file(path, True, size))


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, torch.Size(shape), tuple(stride))
