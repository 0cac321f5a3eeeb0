"""vLLM in the trainer's process: replacement functions for `patches`, state saved while an engine is built, sleep."""

import random
import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import vllm.distributed.parallel_state as parallel_state
from torch import Tensor, nn
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from colocated_grpo.rollout.engine import Part
from colocated_grpo.runtime import rows
from colocated_grpo.runtime.distributed import World

_run_token = ""
"""Random token in the names of this run's shared memory, the same on all ranks."""


def name_shared_memory(world: World) -> None:
    """Choose the run's token for `unique_group_name`. Collective; call before an engine is built on the CPU."""
    global _run_token
    _run_token = world.from_main(lambda: secrets.token_hex(8))


def unique_group_name(communicator: Any) -> str:
    """Name of a tensor-parallel group's shared memory, unique to this run."""
    ranks = "-".join(map(str, communicator.ranks))
    return f"{_run_token}-{communicator.unique_name}-{ranks}"


def join_shared_memory(init_cpu_shm: Callable[[Any], int], group: Any) -> int:
    """Join through vLLM's own function, then unlink the name.

    By then every rank has mapped the memory, so a killed process leaves nothing in /dev/shm.
    """
    handle = init_cpu_shm(group)
    Path(f"/dev/shm/{group.group_name}_{group.communicator.rank}").unlink(missing_ok=True)
    return handle


def default_sampling() -> SamplingParams:
    """Return the parameters of a run's requests at their defaults. Other settings compile their kernels when used."""
    return SamplingParams(temperature=1.0, logprobs=0)


def has_newer_runner(original: Callable[[VllmConfig], bool], config: VllmConfig) -> bool:
    """Return whether the model runs in vLLM's newer model runner by default: mixtures too, but no linear attention."""
    model = config.model_config  # None where the policy calls an operator of vLLM
    return original(config) or (model is not None and model.is_moe and not model.is_hybrid)


def plain_cpu_linear(layer: nn.Module, remove_weight: bool) -> None:
    """Compute the layer with F.linear and keep its weight, in place of vLLM's packed copy."""

    def cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    object.__setattr__(layer, "cpu_linear", cpu_linear)


def linear_by_rows(_layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return rows.linear(x, weight, bias)


def convolve_unpacked(original: Callable[..., Tensor], *, weight: Tensor, **arguments: object) -> Tensor:
    """Call vLLM's convolution with the stored weight [C, 1, W] instead of a copy packed at load time."""
    return original(weight=weight.flatten(1), **{**arguments, "is_weight_packed": False})


def rotate_flat(
    original: Callable[..., Any], rotary: nn.Module, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Call vLLM's rotation with contiguous rows [T, H * D] if it gets [T, H, D] views into wider rows."""
    if query.dim() < 3:
        return original(rotary, positions, query, key)
    rows = [None if heads is None else heads.flatten(1).contiguous() for heads in (query, key)]
    query_TN, key_TN = original(rotary, positions, *rows)
    return query_TN.view(query.shape), None if key is None else key_TN.view(key.shape)


def count_at_least(rows_NV: Tensor, values_N1: Tensor) -> Tensor:
    """Return [N] counts of the entries of each row that are at least the row's value."""
    return (rows_NV >= values_N1).sum(-1)


def forget_graph_pool() -> None:
    """Make the next engine of this process allocate a new memory pool for its CUDA graphs.

    torch refuses to capture into a pool whose graphs are all gone.
    """
    type(current_platform)._global_graph_pool = None


def close_engine_groups() -> None:
    """Destroy vLLM's world group and keep torch's default process group, which is the trainer's."""
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None


@contextmanager
def keep_trainer_state() -> Generator[None]:
    """Restore random states and matmul precision on exit. vLLM reseeds every generator when an engine is built."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    precision = torch.get_float32_matmul_precision()
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def discard(*parts: Part) -> None:
    """Unmap the device memory of these parts. Its contents are lost.

    vLLM's own sleep cannot keep the weights and drop the cache (before 0.32), and collects garbage in the whole heap.
    """
    from vllm.device_allocator import cumem

    allocator = cumem.CuMemAllocator.get_instance()
    torch.cuda.synchronize()
    for data in allocator.pointer_to_data.values():
        if data.tag in parts and not data.is_asleep:
            cumem.unmap_and_release(data.handle)
            data.is_asleep = True


def asleep_bytes() -> int:
    """Return the device memory that is unmapped now."""
    from vllm.device_allocator import cumem

    allocations = cumem.CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(data.handle[1] for data in allocations if data.is_asleep)  # a handle is (device, size, pointer, memory)
