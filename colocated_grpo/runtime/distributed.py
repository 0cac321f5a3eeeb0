"""Process group, device and the few collectives the loop needs. Functions are collective unless they say otherwise."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from colocated_grpo.errors import in_one_line

T = TypeVar("T")

# A peer that died is noticed by the watchdog within seconds, so a collective may wait for a slow but living rank.
COLLECTIVE_TIMEOUT = timedelta(hours=4)


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank's place among the others. Built once by `init_world`."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """One axis over all ranks: the FSDP2 shards."""
    store: dist.Store
    """Key-value store shared by all ranks; the shared prompt counter lives here."""
    control: dist.ProcessGroup
    """Gloo group for plain objects: waiting on it needs no GPU and no NCCL watchdog."""
    checkpoints: dist.ProcessGroup
    """Gloo group of the background checkpoint writer, so that its collectives never mix with the loop's."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather_objects(self, item: T) -> list[T]:
        """Every rank's item, in rank order, on every rank."""
        if self.size == 1:
            return [item]
        gathered: list[T | None] = [None] * self.size
        dist.all_gather_object(gathered, item, group=self.control)
        return gathered

    def broadcast_object(self, item: T | None) -> T:
        """Rank 0's item on every rank."""
        if self.size == 1:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def from_main(self, make: Callable[[], T]) -> T:
        """`make()` runs on rank 0 only; its result, or its exception, reaches every rank."""
        outcome: tuple[T | None, Exception | None] | None = None
        failure: Exception | None = None
        if self.is_main:
            try:
                outcome = (make(), None)
            except Exception as error:  # raised again below, on all ranks, so that none waits for a broadcast for ever
                failure, outcome = error, (None, _portable(error))
        value, error = self.broadcast_object(outcome)
        if error is not None:
            raise error if failure is None else failure
        return value

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce in place."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.control if tensor.device.type == "cpu" else None)
        return tensor


def _portable(error: Exception) -> Exception:
    """The error itself where other processes can build it, as they cannot with many of libraries: those need arguments
    that pickle does not keep, or hold a lock."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(in_one_line(error))
    return error


def init_world() -> World:
    """Join the process group that RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT describe."""
    on_gpu = torch.cuda.is_available()
    # Modulo: some schedulers show each process one GPU and still number the processes.
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if on_gpu
        else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timedelta(minutes=10))))
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("default", store),
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if on_gpu else None,
    )
    return World(
        rank=rank,
        size=size,
        device=device,
        mesh=init_device_mesh(device.type, (size,), mesh_dim_names=("shard",)),
        store=dist.PrefixStore("colocated_grpo", store),
        control=dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT),
        checkpoints=dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT),
    )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded tensor, and any other tensor itself. Not collective."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' rows of a sharded tensor, and any other tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def use_deterministic_kernels() -> None:
    """Kernels that add in a fixed order, for runs that must repeat bit by bit. Call before the first CUDA kernel.

    Slower: attention's backward pass and scattered sums give up their atomic additions. Not collective.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def derive_seed(*parts: int | str) -> int:
    """A 31-bit seed that depends on every part and on nothing else. Not collective."""
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch. Not collective.

    The loop calls this at each step with a seed derived from (run seed, step, rank): random state is then a function of
    the step and needs no place in a checkpoint.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
