"""Process group, device, seeds, and the collectives used by the training loop.

Functions and methods are collective (called by every rank, in the same order) unless documented otherwise.
"""

import os
import pickle
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import blake2b
from itertools import chain
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from colocated_grpo.errors import ConfigError, RunError, in_one_line
from colocated_grpo.runtime import user_code
from colocated_grpo.types import ContextGroup

T = TypeVar("T")

# The watchdog detects dead ranks within seconds, so this timeout only limits the wait for slow ranks.
COLLECTIVE_TIMEOUT = timedelta(hours=4)


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank's index, device and process groups. Built by `init_world` and `with_context`."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """Mesh for FSDP2: one axis, "shard", over all ranks. With replicas on nodes (HSDP): "replicate" over the nodes,
    then "shard" over the ranks of a node."""
    store: dist.Store
    """Key-value store of the run: prompt counter, stop request, first failure."""
    control: dist.ProcessGroup
    """Gloo group for Python objects and CPU tensors. Needs no GPU and has no NCCL timeout."""
    checkpoints: dist.ProcessGroup
    """Gloo group of the background checkpoint writer: its collectives overlap with the collectives on `control`."""
    context: ContextGroup | None = None
    """Group of ranks that split each micro-batch; None: every rank has its own micro-batches."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def shard(self) -> int:
        """Index of this rank among the ranks that shard the model."""
        return self.mesh["shard"].get_local_rank()

    @property
    def num_shards(self) -> int:
        return self.mesh["shard"].size()

    def gather_objects(self, item: T) -> list[T]:
        """Return every rank's item, in rank order, on every rank. Items must be picklable."""
        if self.size == 1:
            return [item]
        gathered: list[T | None] = [None] * self.size
        dist.all_gather_object(gathered, item, group=self.control)
        return cast("list[T]", gathered)

    def broadcast_object(self, item: T | None) -> T:
        """Return rank 0's item on every rank, whatever the others pass. Raises RunError if it cannot be pickled."""
        box = [item]
        if self.size > 1:
            try:
                dist.broadcast_object_list(box, src=0, group=self.control)
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise RunError(f"a prompt or another object for all ranks: {in_one_line(error)}") from error
        return cast("T", box[0])

    def from_main(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 only. Return its result or raise its exception on every rank.

        Of several ranks, all raise the same RunError for an exception of user code.
        """
        outcome: tuple[T | None, Exception | None] | None = None
        failure: Exception | None = None
        if self.is_main:
            try:
                outcome = (make(), None)
            except Exception as error:  # broadcast the error too, or the other ranks would wait forever
                failure = _named_place(error) if self.size > 1 else error
                outcome = (None, _picklable(failure))
        value, error = self.broadcast_object(outcome)
        if error is not None:
            raise error if failure is None else failure
        return cast("T", value)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce `tensor` in place and return it."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce `tensor` in place by maximum and return it."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.control if tensor.device.type == "cpu" else None)
        return tensor


def _named_place(error: Exception) -> Exception:
    """Return a RunError that names the line of user code that raised `error`; `error` if there is no such line."""
    line = user_code.innermost(user_code.lines_of_error(error))
    if line is None or isinstance(error, RunError | ConfigError):
        return error
    named = RunError(f"{in_one_line(error)} ({line.place})")
    named.__cause__ = error  # its place is recorded
    return named


def _picklable(error: Exception) -> Exception:
    """Return `error` if it can be pickled, else a RuntimeError with its type and message.

    Many library errors cannot be pickled: they contain a lock, or arguments of their constructor are not stored.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(in_one_line(error))
    return error


def init_world(store: dist.Store | None = None, *, replicate_nodes: bool = False) -> World:
    """Join the process group described by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    store: key-value store of all ranks. Default: a TCP store served by rank 0 or torchrun. replicate_nodes: shard over
    the LOCAL_WORLD_SIZE ranks of each node and replicate over nodes. Raises ConfigError if nodes have different sizes.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        # Modulo, because some schedulers make only one GPU visible to each process but still count up LOCAL_RANK.
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timedelta(minutes=10))))
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("default", store),
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if on_gpu else None,
    )
    control = new_gloo_group()
    if replicate_nodes:
        mesh = mesh_of_nodes(device, control)
    else:
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    own = dist.PrefixStore("colocated_grpo", store)
    checkpoints = new_gloo_group()
    return World(rank=rank, size=size, device=device, mesh=mesh, store=own, control=control, checkpoints=checkpoints)


def mesh_of_nodes(device: torch.device, control: dist.ProcessGroup) -> DeviceMesh:
    """Return the mesh with axes "replicate" and "shard". control: `World.control`. Raises ConfigError. Collective."""
    if "LOCAL_WORLD_SIZE" not in os.environ:  # ranks started by hand
        advice = "start with the launcher, torchrun or srun"
        raise ConfigError(f"policy.replicate=nodes: LOCAL_WORLD_SIZE is not set; {advice}")
    own = (int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    places = [(0, 0)] * control.size()
    dist.all_gather_object(places, own, group=control)
    ranks_per_node = own[0]
    if places != [(ranks_per_node, rank % ranks_per_node) for rank in range(len(places))]:
        counts = ", ".join(str(count) for count, local in places if local == 0)
        rule = f"every node needs the same number of ranks, numbered node by node; the nodes have {counts}"
        raise ConfigError(f"policy.replicate=nodes: {rule}")
    ranks = torch.arange(len(places)).view(-1, ranks_per_node)
    limit = COLLECTIVE_TIMEOUT  # `init_device_mesh` would use torch's default, which a slow rank may exceed
    groups = [dist.new_subgroups_by_enumeration(each.tolist(), timeout=limit)[0] for each in (ranks.T, ranks)]
    own_groups = cast("list[dist.ProcessGroup]", groups)  # every rank is in one group of each axis
    return DeviceMesh.from_group(own_groups, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def with_context(world: World, size: int) -> World:
    """Return `world` with context-parallel groups of `size` consecutive ranks; `size` must divide their number."""
    if size == 1:
        return world
    group, _ = dist.new_subgroups(size, timeout=COLLECTIVE_TIMEOUT)
    own = cast("dist.ProcessGroup", group)  # every rank is in one group
    return replace(world, context=ContextGroup(own.rank(), own.size(), own.group_name))


def new_gloo_group(timeout: timedelta = COLLECTIVE_TIMEOUT) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # new_group returns another type only on non-member ranks
    return group


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a DTensor, and any other tensor unchanged. Not collective."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: torch.Tensor) -> int:
    """Return the index of the first of this rank's rows of a DTensor; 0 for any other tensor. Not collective."""
    if not isinstance(tensor, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0]


def with_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a tensor with this rank's contiguous `rows`, sharded as `tensor`. Not collective."""
    if not isinstance(tensor, DTensor):
        return rows
    shape, mesh = torch.Size((tensor.shape[0], *rows.shape[1:])), tensor.device_mesh
    return DTensor.from_local(rows, mesh, tensor.placements, run_check=False, shape=shape, stride=rows.stride())


@dataclass(frozen=True, eq=False)
class Computed(Mapping[str, torch.Tensor]):
    """Tensors by name, some of which are computed on access, because they would not fit into memory together."""

    held: Mapping[str, torch.Tensor]
    sharded_as: Mapping[str, torch.Tensor]
    """For each computed tensor, one with the same rows on each rank."""
    compute: Callable[[Sequence[str]], Sequence[torch.Tensor]]
    """Returns this rank's rows of the computed tensors with these names. Not collective."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.held:
            return self.held[name]
        return with_rows(self.sharded_as[name], self.compute([name])[0])

    def __iter__(self) -> Iterator[str]:
        return chain(self.held, self.sharded_as)

    def __len__(self) -> int:
        return len(self.held) + len(self.sharded_as)


def held(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the tensors in memory, without those that are computed on access."""
    return tensors.held if isinstance(tensors, Computed) else tensors


def own_rows(tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> list[torch.Tensor]:
    """Compute and return this rank's rows of the tensors with these names, without making DTensors. Not collective."""
    if not isinstance(tensors, Computed):
        return [local_part(tensors[name]) for name in names]
    wanted = [name for name in names if name not in tensors.held]
    computed = dict(zip(wanted, tensors.compute(wanted), strict=True))
    return [computed[name] if name in computed else local_part(tensors.held[name]) for name in names]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All-gather a DTensor into a full tensor. Any other tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_group(tensors: Iterable[torch.Tensor]) -> dist.ProcessGroup | None:
    """Return the group of ranks that shard these DTensors; None for plain tensors. Not collective."""
    sharded = next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)
    return None if sharded is None else sharded.device_mesh.get_group(sharded.device_mesh.ndim - 1)


def use_deterministic_kernels() -> None:
    """Select kernels with a fixed summation order, for bit-identical runs. Call before the first CUDA kernel.

    Slower, because the backward pass of attention and scatter-adds cannot use atomic additions. Not collective.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def derive_seed(*parts: int | str) -> int:
    """Return a 31-bit seed that depends only on the parts. Not collective."""
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch. Not collective.

    Called at each step with a seed derived from (run seed, step, rank), so that checkpoints need no random state.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
