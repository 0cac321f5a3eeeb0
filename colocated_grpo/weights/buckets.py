"""Parameters in buckets: every rank contributes its rows of each parameter, and an engine takes the part that it holds.

FSDP2 gives rank r the rows [r * chunk, (r + 1) * chunk) of a parameter; the last ranks get fewer rows or none. In a
bucket, each parameter has a slot of `chunk` rows, so that offsets are equal on all ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from colocated_grpo.runtime.distributed import held, own_rows, shard_group
from colocated_grpo.weights.plan import Plan, Target

BUCKET_BYTES = 512 << 20
"""Gathered bytes of one bucket. Two buckets are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parameters that are gathered together."""

    shapes: dict[str, torch.Size]
    """By checkpoint name, in order."""
    dtype: torch.dtype
    """Type of the gathered values."""
    num_shards: int
    """Ranks that together hold the parameters."""
    size: int
    """Elements that each of these ranks contributes, padding included."""

    def slots(self) -> Iterator[tuple[str, torch.Size, int]]:
        """Yield name, shape and offset in a rank's contribution."""
        offset = 0
        for name, shape in self.shapes.items():
            yield name, shape, offset
            offset += _slot_numel(shape, self.num_shards)


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """The rows of a parameter that one rank contributes, and their destination in the engine."""

    destination: Tensor
    """View into an engine parameter."""
    name: str
    """Checkpoint name of the parameter."""
    rank: int
    offset: int
    """Elements before this slice in the rank's part of the bucket."""
    shape: tuple[int, ...]
    """Shape of the contributed rows."""
    cut: tuple[slice, ...]
    """Part of the contributed rows that belongs to this engine rank (tensor parallelism)."""

    def source(self, gathered: Tensor) -> Tensor:
        """Return the values for `destination`. gathered: [shards, bucket.size]."""
        rows = gathered[self.rank, self.offset : self.offset + prod(self.shape)]
        return rows.view(self.shape)[self.cut]


def count_shards(parameters: Mapping[str, Tensor]) -> int:
    """Return the number of ranks that together hold these parameters."""
    group = shard_group(held(parameters).values())
    return 1 if group is None else group.size()


def make_buckets(shapes: Mapping[str, torch.Size], num_shards: int, dtype: torch.dtype) -> list[Bucket]:
    """Split the parameters, in order, into buckets of about BUCKET_BYTES gathered."""
    limit = BUCKET_BYTES // max(dtype.itemsize, 2) // num_shards  # 8 bits: rounded from a 16-bit copy, which counts
    buckets: list[Bucket] = []
    members: dict[str, torch.Size] = {}
    size = 0
    for name, shape in shapes.items():
        slot = _slot_numel(shape, num_shards)
        if members and size + slot > limit:
            buckets.append(Bucket(shapes=members, dtype=dtype, num_shards=num_shards, size=size))
            members, size = {}, 0
        members[name] = shape
        size += slot
    if members:
        buckets.append(Bucket(shapes=members, dtype=dtype, num_shards=num_shards, size=size))
    return buckets


def gather(bucket: Bucket, parameters: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """All-gather the bucket's parameters, cast to its type: [shards, bucket.size]. Collective."""
    own = torch.empty(bucket.size, dtype=bucket.dtype, device=device)
    members, group = own_rows(parameters, bucket.shapes), shard_group(held(parameters).values())
    slots = [
        own[offset : offset + member.numel()].view(member.shape)
        for member, (_, _, offset) in zip(members, bucket.slots(), strict=True)
    ]
    torch._foreach_copy_(slots, members)
    if group is None or bucket.num_shards == 1:
        return own[None]
    gathered = torch.empty(bucket.num_shards, bucket.size, dtype=bucket.dtype, device=device)
    dist.all_gather_into_tensor(gathered.view(-1), own, group=group)
    return gathered


def full_tensors(bucket: Bucket, gathered: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the bucket's parameters as whole tensors. gathered: [shards, bucket.size]."""
    for name, shape, offset in bucket.slots():
        chunk = _chunk(shape, bucket.num_shards)
        parts = gathered[:, offset : offset + chunk * prod(shape[1:])].reshape(-1, *shape[1:])
        yield name, parts[: shape[0]]


def shard_slices(bucket: Bucket, plan: Plan) -> list[ShardSlice]:
    """Return the slices of all ranks that the plan's engine needs."""
    found: list[ShardSlice] = []
    for name, shape, offset in bucket.slots():
        chunk = _chunk(shape, bucket.num_shards)
        for rank in range(bucket.num_shards):
            first, last = min(rank * chunk, shape[0]), min((rank + 1) * chunk, shape[0])
            contributed = (last - first, *shape[1:])
            if (overlap := _overlap(plan.targets[name], first, last - first)) is not None:
                destination, cut = overlap
                found.append(
                    ShardSlice(destination=destination, name=name, rank=rank, offset=offset, shape=contributed, cut=cut)
                )
    return found


def _overlap(target: Target, first: int, rows: int) -> tuple[Tensor, tuple[slice, ...]] | None:
    """Return the part of the engine's view that these rows cover, and which part of the rows; None without overlap."""
    wanted = target.view.shape[target.dim]
    if target.dim == 1:
        cut: tuple[slice, ...] = (slice(None), slice(target.start, target.start + wanted))
        begin, count = first, rows
    else:
        begin, end = max(first, target.start), min(first + rows, target.start + wanted)
        cut, count = (slice(begin - first, end - first),), end - begin
        begin -= target.start
    if count <= 0:
        return None
    return target.view.narrow(0, begin, count), cut


def _chunk(shape: torch.Size, num_shards: int) -> int:
    return -(-shape[0] // num_shards)


def _slot_numel(shape: torch.Size, num_shards: int) -> int:
    """Elements of a parameter's largest shard."""
    return _chunk(shape, num_shards) * prod(shape[1:])


def values_of(
    slices: Sequence[ShardSlice], bucket: Bucket, parameters: Mapping[str, Tensor], device: torch.device
) -> list[Tensor]:
    """Return the values for the destinations of a bucket's slices, on the device. Collective."""
    is_resident = next(iter(held(parameters).values())).device.type == device.type
    # On one rank a buffer only costs: the host makes two views of each parameter, and each value is copied twice.
    if bucket.num_shards == 1 and is_resident:
        rows = own_rows(parameters, [part.name for part in slices])
        return [own[part.cut] for own, part in zip(rows, slices, strict=True)]
    gathered = gather(bucket, parameters, device)
    return [part.source(gathered) for part in slices]


def write_planned(parts: Iterable[tuple[Sequence[ShardSlice], list[Tensor]]], plan: Plan, device: torch.device) -> None:
    """Copy every bucket's values to their destinations, and clear the plan's padding.

    On CUDA the copies run on a side stream, in parallel with the next gather. parts: slices and values of each bucket.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    last: torch.Event | None = None
    for slices, sources in parts:
        destinations = [part.destination for part in slices]
        if stream is None:
            torch._foreach_copy_(destinations, sources)
            continue
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch._foreach_copy_(destinations, sources)
            for source in sources:
                source.record_stream(stream)
        if last is not None:
            last.synchronize()  # each gather queued further ahead would need one more bucket of memory
        last = stream.record_event()
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
    for rows in plan.padding:
        rows.zero_()
