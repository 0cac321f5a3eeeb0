"""Weight sync from FSDP2 shards into the engine of the same process.

Each rank casts its shards to the engine's type, all-gathers them in buckets, and copies every gathered bucket straight
into the engine's parameters on a side stream while the next bucket is being gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from colocated_grpo.rollout.engine import RolloutEngine
from colocated_grpo.runtime.distributed import local_part, whole
from colocated_grpo.weights.plan import Plan, Target, build_plan

BUCKET_BYTES = 512 << 20
"""Gathered bytes of one bucket. Two buckets are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """The rows of a parameter that one rank contributes, and their destination in the engine."""

    destination: Tensor
    """View into an engine parameter."""
    rank: int
    offset: int
    """Elements before this slice in the rank's part of the bucket."""
    shape: tuple[int, ...]
    """Shape of the contributed rows."""
    cut: tuple[slice, ...]
    """Part of those rows that belongs to this engine rank (tensor parallelism)."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parameters that are gathered together."""

    parameters: list[Tensor]
    size: int
    """Elements that each rank contributes, padding included."""
    slices: list[ShardSlice]


class ColocatedSync:
    """Copies the policy's weights into the engine. Every method is collective, called in lockstep by all ranks.

    The first sync uses the engine's own `load_weights`. A plan built afterwards is adopted only if each of its views
    holds bit for bit what that load has written; otherwise all syncs use `load_weights`.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        engine: RolloutEngine,
        agree: Callable[[bool], bool],
        *,
        device: torch.device,
        planned: bool = True,
    ) -> None:
        """parameters: sharded tensors by checkpoint name. agree: logical AND over all ranks, collective.

        planned: False always uses the engine's own loader.
        """
        self._parameters = parameters
        self._engine = engine
        self._agree = agree
        self._planned = planned and not engine.transforms_weights
        self._device = device
        self._dtype = next(engine.model.parameters()).dtype
        self.plan: Plan | None = None
        """Destination of each parameter. None until the plan is verified, and for models without a valid plan."""
        self._buckets: list[Bucket] = []
        self._loaded_once = False

    @property
    def path(self) -> str:
        """'views' (planned copies) or 'load_weights' (the engine's loader)."""
        return "views" if self.plan is not None else "load_weights"

    @torch.no_grad()
    def sync(self) -> None:
        if self.plan is not None:
            self._write(self.plan)
            return
        self._engine.load_weights(self._full_tensors())
        if not self._loaded_once:
            self._loaded_once = True
            self._adopt_verified_plan()

    def _full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield name, whole(parameter.detach()).to(self._device, self._dtype)

    def _adopt_verified_plan(self) -> None:
        """Set `plan` if on every rank its views hold, bit for bit, what `load_weights` has just written."""
        plan = None
        if self._planned:
            shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
            plan = build_plan(self._engine.model, shapes, self._engine.tensor_parallel_rank)
        if not self._agree(plan is not None) or plan is None:
            return
        self._buckets = make_buckets(self._parameters, plan, self._world_size(), self._dtype)
        loaded = [self._is_loaded(bucket) for bucket in self._buckets]  # of every bucket: all ranks join all gathers
        if self._agree(all(loaded)):
            self.plan = plan

    def _is_loaded(self, bucket: Bucket) -> bool:
        sources = self._sources(bucket, self._gather(bucket))
        return all(torch.equal(part.destination, source) for part, source in zip(bucket.slices, sources, strict=True))

    def _write(self, plan: Plan) -> None:
        copy = _SideStreamCopy(self._device)
        for bucket in self._buckets:
            gathered = self._gather(bucket)
            copy([part.destination for part in bucket.slices], self._sources(bucket, gathered))
        copy.wait()
        for rows in plan.padding:
            rows.zero_()

    def _world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def _gather(self, bucket: Bucket) -> Tensor:
        """[world size, bucket.size] in the engine's type."""
        own = torch.empty(bucket.size, dtype=self._dtype, device=self._device)
        torch._foreach_copy_(_slots(own, bucket, self._world_size()), [local_part(p) for p in bucket.parameters])
        if self._world_size() == 1:
            return own[None]
        gathered = torch.empty(self._world_size(), bucket.size, dtype=self._dtype, device=self._device)
        dist.all_gather_into_tensor(gathered.view(-1), own)
        return gathered

    @staticmethod
    def _sources(bucket: Bucket, gathered: Tensor) -> list[Tensor]:
        rows = gathered.unbind(0)
        return [
            rows[part.rank][part.offset : part.offset + _numel(part.shape)].view(part.shape)[part.cut]
            for part in bucket.slices
        ]


class _SideStreamCopy:
    """Copies on a side stream on CUDA, in parallel with the next gather; plain copies on other devices."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: torch.Event | None = None

    def __call__(self, destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        if self._stream is None:
            torch._foreach_copy_(list(destinations), list(sources))
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(list(destinations), list(sources))
            for source in sources:
                source.record_stream(self._stream)
        if self._last is not None:
            self._last.synchronize()  # each gather queued further ahead would need one more bucket of memory
        self._last = self._stream.record_event()

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def make_buckets(parameters: Mapping[str, Tensor], plan: Plan, world_size: int, dtype: torch.dtype) -> list[Bucket]:
    """Split the parameters, in order, into buckets of about BUCKET_BYTES gathered."""
    limit = BUCKET_BYTES // dtype.itemsize // world_size
    buckets: list[Bucket] = []
    members: list[Tensor] = []
    slices: list[ShardSlice] = []
    size = 0
    for name, parameter in parameters.items():
        slot = _slot_numel(parameter.shape, world_size)
        if members and size + slot > limit:
            buckets.append(Bucket(parameters=members, size=size, slices=slices))
            members, slices, size = [], [], 0
        members.append(parameter)
        slices += _slices(parameter.shape, plan.targets[name], world_size, size)
        size += slot
    return [*buckets, Bucket(parameters=members, size=size, slices=slices)]


def _slices(shape: torch.Size, target: Target, world_size: int, offset: int) -> list[ShardSlice]:
    """Slices of all ranks. FSDP2 gives rank r the rows [r * chunk, (r + 1) * chunk), the last ranks fewer or none."""
    chunk = -(-shape[0] // world_size)
    slices = []
    for rank in range(world_size):
        first, last = min(rank * chunk, shape[0]), min((rank + 1) * chunk, shape[0])
        part = _slice(shape, target, rank, offset, first, last - first)
        if part is not None:
            slices.append(part)
    return slices


def _slice(shape: torch.Size, target: Target, rank: int, offset: int, first: int, rows: int) -> ShardSlice | None:
    """Overlap of one rank's rows with the rows of the engine's view; None if there is none."""
    wanted = target.view.shape[target.dim]
    contributed = (rows, *shape[1:])
    if target.dim == 1:
        cut: tuple[slice, ...] = (slice(None), slice(target.start, target.start + wanted))
        begin, count = first, rows
    else:
        begin, end = max(first, target.start), min(first + rows, target.start + wanted)
        cut, count = (slice(begin - first, end - first),), end - begin
        begin -= target.start
    if count <= 0:
        return None
    destination = target.view.narrow(0, begin, count)
    return ShardSlice(destination=destination, rank=rank, offset=offset, shape=contributed, cut=cut)


def _slots(own: Tensor, bucket: Bucket, world_size: int) -> list[Tensor]:
    """Views into this rank's contribution `own`, one for the local rows of each parameter."""
    slots, offset = [], 0
    for parameter in bucket.parameters:
        local = local_part(parameter)
        slots.append(own[offset : offset + local.numel()].view(local.shape))
        offset += _slot_numel(parameter.shape, world_size)
    return slots


def _slot_numel(shape: torch.Size, world_size: int) -> int:
    """Elements of a parameter's largest shard. Slots of all ranks have this size, so that offsets agree."""
    return -(-shape[0] // world_size) * _numel(shape[1:])


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
