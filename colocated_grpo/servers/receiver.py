"""The server's side of `broadcast`: receives the trainer's buckets and writes them into the engine."""

import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Self

import torch
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from colocated_grpo.errors import in_one_line
from colocated_grpo.policy.conversion import read_conversion
from colocated_grpo.rollout.engine import LocalEngine
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.stores import CONNECT_SECONDS, connect_store
from colocated_grpo.servers.broadcast import JoinedGroup
from colocated_grpo.servers.request_bodies import StrictBody
from colocated_grpo.types import JsonObject
from colocated_grpo.weights.buckets import Bucket, full_tensors, make_buckets, shard_slices, write_planned
from colocated_grpo.weights.fingerprints import rows_of
from colocated_grpo.weights.plan import Plan, verified_plan
from colocated_grpo.weights.transport import Fingerprints, Summed, ViewFingerprints

Count = Annotated[int, Field(gt=0, le=1 << 16)]
Shape = Annotated[list[Annotated[int, Field(gt=0, lt=1 << 40)]], Field(min_length=1, max_length=8)]
MAX_TIMEOUT = 86_400.0
MAX_ELEMENTS = 1 << 42
"""Bound of a model's parameters: four trillion."""


class Offer(StrictBody):
    """Description of a trainer's process group: the body of /bridge/init."""

    model_config = ConfigDict(allow_inf_nan=False)
    address: str = Field(max_length=255)
    """Address of the group's store."""
    port: int = Field(gt=0, lt=1 << 16)
    first_rank: Count
    """Group rank of this server's first rank. The trainer has rank 0."""
    group_size: Count
    timeout: float = Field(gt=0, le=MAX_TIMEOUT)
    trainer_ranks: Count
    prefix: str = Field(max_length=255)
    """Prefix of the base model in checkpoint names, such as "model"."""
    shapes: dict[str, Shape] = Field(min_length=1)
    """Shapes of the trainer's parameters, by checkpoint name."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.first_rank >= self.group_size:
            raise ValueError(f"first_rank: must be below group_size={self.group_size}")
        if sum(map(math.prod, self.shapes.values())) > MAX_ELEMENTS:
            raise ValueError(f"shapes: more than {MAX_ELEMENTS} elements")
        return self


class WeightReceiver:
    """Receives a trainer's weights for the engine of this rank. Every method is collective over the engine's ranks."""

    def __init__(self, engine: LocalEngine, folder: Path, world: World) -> None:
        """folder: folder of the engine's loaded model. world: the engine's ranks."""
        self._engine = engine
        self._folder = folder
        self._conversion = read_conversion(folder)
        self._device = world.device
        self._world = world
        self._dtype = next(engine.model.parameters()).dtype
        self._group: JoinedGroup | None = None
        self._buckets: list[Bucket] = []
        self._plan: Plan | None = None
        self._views: ViewFingerprints | None = None
        """Fingerprints of the copy plan's views; None without a plan."""
        self._planned_shapes: Mapping[str, torch.Size] | None = None
        """Shapes of the last plan. For these shapes no further plan is made: after an update, the engine no longer has
        the folder's weights."""

    def join(self, offer: Offer) -> None:
        """Leave the previous group, if any, and join a trainer's group. Raises ValueError on failure."""
        rank = offer.first_rank + self._engine.tensor_parallel_rank
        if rank >= offer.group_size:
            raise ValueError(f"rank {rank} of this engine is not in the trainer's group of {offer.group_size}")
        shapes = {name: torch.Size(shape) for name, shape in offer.shapes.items()}
        if shapes != self._planned_shapes:
            plan = verified_plan(self._engine, shapes, offer.prefix, self._folder)
            planned = all(self._world.gather_objects(plan is not None))
            self._plan, self._views = None, None
            if plan is not None and planned:
                targets = plan.targets.values()
                self._plan = plan
                self._views = ViewFingerprints(targets, shapes.values(), self._world, plan.is_current)
            self._planned_shapes = shapes
        self._buckets = make_buckets(shapes, offer.trainer_ranks, self._dtype)
        self._leave()
        try:
            # The timeout is short, because the engine waits. The store starts before the offer is sent, so an
            # unreachable store is gone.
            store = connect_store(offer.address, offer.port, CONNECT_SECONDS)
            store.set_timeout(timedelta(seconds=offer.timeout))
            self._group = JoinedGroup(store, rank, offer.group_size, self._device, offer.timeout)
        except RuntimeError as error:
            raise ValueError(f"cannot join the trainer at {offer.address}:{offer.port}: {in_one_line(error)}") from None

    @torch.no_grad()
    def update(self) -> JsonObject:
        """Receive and write all weights. Return fingerprints, so that the trainer can verify the transfer.

        With a plan, these are the fingerprints of the engine's views; else of the tensors passed to the engine's
        loader. Call only after `join`. Raises ValueError if the connection of the trainer is lost.
        """
        assert self._group is not None  # `EngineControl.receive_weights` requires a trainer
        plan, views, loaded = self._plan, self._views, list[Tensor]()
        try:
            if plan is None:
                self._engine.load_weights(self._stored(loaded))
            else:
                received = ((shard_slices(bucket, plan), values) for bucket, values in self._received())
                write_planned(received, plan, self._device)
        except RuntimeError as error:
            self._leave()
            raise ValueError(f"the trainer's connection is lost: {in_one_line(error)}") from None
        own = torch.cat(loaded) if views is None else views.compute()
        copies = torch.full_like(own, self._world.size) if views is None else views.copies
        return Summed(self._world.sum_(own), copies).to_json()

    def _stored(self, fingerprints: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors for the engine's loader, and append each bucket's fingerprints to `fingerprints`."""
        for bucket in self._received():
            values = dict(full_tensors(*bucket))
            parts = [rows_of(value, 0) for value in values.values()]
            fingerprints.append(Fingerprints(parts, None, self._device).compute())
            for name, value in values.items():
                yield from self._conversion.stored(name, value)

    def _received(self) -> Iterator[tuple[Bucket, Tensor]]:
        assert self._group is not None
        for bucket in self._buckets:
            values = torch.empty(bucket.num_shards, bucket.size, dtype=self._dtype, device=self._device)
            self._group.broadcast(values).wait()
            yield bucket, values

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
