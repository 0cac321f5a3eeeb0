"""Weights from FSDP2 shards into the engine of the same process.

Shards are cast to the engine's type before anything moves, gathered in buckets on a second stream, and copied from the
gathered bucket straight into the engine's parameters while the next bucket is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colocated_grpo.runtime.distributed import local_part, whole
from colocated_grpo.weights.plan import Plan, Target, build_plan

BUCKET_BYTES = 512 << 20
"""Gathered bytes of one bucket; two exist at a time."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows [first, first + rows) of a parameter, as one rank contributes them, and where they go."""

    destination: Tensor
    rank: int
    offset: int
    """Elements before this piece in the rank's part of the bucket."""
    shape: tuple[int, ...]
    """Of the contributed rows."""
    cut: tuple[slice, ...]
    """What of those rows this engine rank takes."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    parameters: list[Tensor]
    size: int
    """Elements that each rank contributes, padding included."""
    pieces: list[Piece]


class ColocatedSync:
    """Writes the policy's weights into the engine. Collective, in lockstep over all ranks.

    The first sync goes through the engine's own `load_weights`; the plan built then is used only if every one of its
    views holds exactly what that load wrote.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        engine_model: nn.Module,
        tensor_parallel_rank: int,
        load_weights: Callable[[Iterator[tuple[str, Tensor]]], None],
        agree: Callable[[bool], bool],
        *,
        transformed: bool,
        device: torch.device,
    ) -> None:
        self._parameters = parameters
        self._model = engine_model
        self._rank = tensor_parallel_rank
        self._load_weights = load_weights
        self._agree = agree
        self._transformed = transformed
        self._device = device
        self._dtype = next(engine_model.parameters()).dtype
        self.plan: Plan | None = None
        """Where weights are written; None before it is proven, and where it cannot be."""
        self._buckets: list[Bucket] = []
        self._proven = False

    @property
    def path(self) -> str:
        """How weights travel: 'views' (planned copies) or 'load_weights' (the engine's loader)."""
        return "views" if self.plan is not None else "load_weights"

    @torch.no_grad()
    def sync(self) -> None:
        if self.plan is not None:
            self._write()
            return
        self._load_weights(self._full_tensors())
        if not self._proven:
            self._proven = True
            self._prove()

    def _full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield name, whole(parameter.detach()).to(self._device, self._dtype)

    def _prove(self) -> None:
        """Adopt a plan if its views hold, bit for bit, what `load_weights` has just written, on every rank."""
        plan = None
        if not self._transformed:
            shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
            plan = build_plan(self._model, shapes, self._rank)
        if not self._agree(plan is not None):
            return
        self._buckets = make_buckets(self._parameters, plan, self._world_size(), self._dtype)
        held = [self._holds(bucket) for bucket in self._buckets]  # all of them: every rank joins every gather
        if self._agree(all(held)):
            self.plan = plan

    def _holds(self, bucket: Bucket) -> bool:
        sources = self._sources(bucket, self._gather(bucket))
        return all(torch.equal(piece.destination, source) for piece, source in zip(bucket.pieces, sources, strict=True))

    def _write(self) -> None:
        copy = _SideStreamCopy(self._device)
        for bucket in self._buckets:
            gathered = self._gather(bucket)
            copy([piece.destination for piece in bucket.pieces], self._sources(bucket, gathered))
        copy.wait()
        for rows in self.plan.padding:
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
            rows[piece.rank][piece.offset : piece.offset + _numel(piece.shape)].view(piece.shape)[piece.cut]
            for piece in bucket.pieces
        ]


class _SideStreamCopy:
    """Copies that run beside the next gather on CUDA, and at once elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: torch.cuda.Event | None = None

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
            self._last.synchronize()  # gathers queued further ahead would each need a bucket's memory
        self._last = self._stream.record_event()

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def make_buckets(parameters: Mapping[str, Tensor], plan: Plan, world_size: int, dtype: torch.dtype) -> list[Bucket]:
    """Parameters in order, cut into buckets of about BUCKET_BYTES gathered."""
    limit = BUCKET_BYTES // dtype.itemsize // world_size
    buckets: list[Bucket] = []
    members: list[Tensor] = []
    pieces: list[Piece] = []
    size = 0
    for name, parameter in parameters.items():
        slot = _slot_numel(parameter.shape, world_size)
        if members and size + slot > limit:
            buckets.append(Bucket(parameters=members, size=size, pieces=pieces))
            members, pieces, size = [], [], 0
        members.append(parameter)
        pieces += _pieces(parameter.shape, plan.targets[name], world_size, size)
        size += slot
    return [*buckets, Bucket(parameters=members, size=size, pieces=pieces)]


def _pieces(shape: torch.Size, target: Target, world_size: int, offset: int) -> list[Piece]:
    """FSDP2 gives rank r the rows [r * chunk, (r + 1) * chunk), the last ranks fewer or none."""
    chunk = -(-shape[0] // world_size)
    pieces = []
    for rank in range(world_size):
        first, last = min(rank * chunk, shape[0]), min((rank + 1) * chunk, shape[0])
        piece = _piece(shape, target, rank, offset, first, last - first)
        if piece is not None:
            pieces.append(piece)
    return pieces


def _piece(shape: torch.Size, target: Target, rank: int, offset: int, first: int, rows: int) -> Piece | None:
    """The overlap of one rank's rows with what the engine's view takes; None where they do not meet."""
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
    return Piece(destination=target.view.narrow(0, begin, count), rank=rank, offset=offset, shape=contributed, cut=cut)


def _slots(own: Tensor, bucket: Bucket, world_size: int) -> list[Tensor]:
    """Views into this rank's contribution, one for each parameter's local rows."""
    slots, offset = [], 0
    for parameter in bucket.parameters:
        local = local_part(parameter)
        slots.append(own[offset : offset + local.numel()].view(local.shape))
        offset += _slot_numel(parameter.shape, world_size)
    return slots


def _slot_numel(shape: torch.Size, world_size: int) -> int:
    """Elements of the largest share of a parameter; every rank's slot has this size so that offsets agree."""
    return -(-shape[0] // world_size) * _numel(shape[1:])


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
