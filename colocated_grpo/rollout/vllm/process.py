"""Living with vLLM in the trainer's process: what it changes globally is put back, what it destroys is kept."""

from __future__ import annotations

import gc
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import vllm.distributed.parallel_state as parallel_state
import vllm.envs
import vllm.v1.engine.core as engine_core
import vllm.v1.sample.sampler as sampler
from torch import Tensor, nn
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed
from vllm.model_executor.layers import utils as linear_layers
from vllm.model_executor.warmup import kernel_warmup

from colocated_grpo.rollout.engine import Part
from colocated_grpo.runtime.distributed import World

_INIT_CPU_SHM = _CPUSHMDistributed._init_cpu_shm


def prepare_process(world: World) -> None:
    """Make vLLM fit for co-location. Call before each engine is built. Collective."""
    engine_core.cleanup_dist_env_and_memory = _close_engine_groups
    engine_core.freeze_gc_heap = _leave_heap  # the trainer does this once, when all of it is built
    # vLLM compiles this one comparison, and the first completions of every run would wait for its compiler.
    sampler.batched_count_greater_than = _count_at_least
    if world.device.type == "cpu":
        # The CPU backend repacks linear weights after loading, which leaves nothing to write new weights into.
        linear_layers.dispatch_cpu_unquantized_gemm = _plain_cpu_linear
        _name_shared_memory(world.from_main(lambda: secrets.token_hex(8)))
        _CPUSHMDistributed._init_cpu_shm = _join_shared_memory
    else:
        # Triton exists beside CUDA only.
        from colocated_grpo.rollout.vllm import decode_attention, qkv_kernel, sampling_kernels

        # On Hopper vLLM before 0.32 compiles the routers of a few large models at each start, whatever it holds.
        kernel_warmup._LL_BF16_WARMUP_MODEL_SHAPES = ()
        decode_attention.install()
        qkv_kernel.install()
        sampling_kernels.install()


def _name_shared_memory(unique: str) -> None:
    """Give the shared memory of tensor-parallel CPU engines a name of its own.

    Under an external launcher vLLM gives every engine of a host the same one: two runs would share it, and what a
    killed run leaves behind would keep all later ones from starting.
    """

    def make_group_name(communicator: CpuCommunicator) -> str:
        ranks = "-".join(map(str, communicator.ranks))
        return f"{unique}-{communicator.unique_name}-{ranks}"

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)


def _join_shared_memory(group: _CPUSHMDistributed) -> int:
    """vLLM's own, after which the memory's name goes: all have joined, and a process that is killed removes none."""
    handle = _INIT_CPU_SHM(group)
    Path(f"/dev/shm/{group.group_name}_{group.communicator.rank}").unlink(missing_ok=True)
    return handle


def _plain_cpu_linear(layer: nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = lambda x, weight, bias: F.linear(x, weight, bias)


def _leave_heap() -> None: ...


def _count_at_least(rows_NV: Tensor, values_N1: Tensor) -> Tensor:
    return (rows_NV >= values_N1).sum(-1)


def _close_engine_groups(shutdown_ray: bool = False) -> None:
    """vLLM's own clean-up without its last act, destroying the default process group, which is the trainer's."""
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None
    vllm.envs.disable_envs_cache()
    gc.unfreeze()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def keep_trainer_state() -> Iterator[None]:
    """Building an engine reseeds every generator and changes matmul precision."""
    states: tuple[object, tuple, Tensor] = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    on_gpu = torch.cuda.is_available()
    cuda_state = torch.cuda.get_rng_state() if on_gpu else None
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpu:
            torch.cuda.set_rng_state(cuda_state)


def discard(*parts: Part) -> None:
    """Unmap these parts' memory; what it held is lost.

    vLLM's own sleep cannot keep the weights and drop the cache (before 0.32), and it runs the garbage collector over
    the whole heap.
    """
    from vllm.device_allocator import cumem

    allocator = cumem.CuMemAllocator.get_instance()
    torch.cuda.synchronize()
    for data in allocator.pointer_to_data.values():
        if data.tag in parts and not data.is_asleep:
            cumem.unmap_and_release(data.handle)
            data.is_asleep = True
