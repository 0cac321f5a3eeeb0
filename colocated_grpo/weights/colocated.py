"""Weight sync from FSDP2 shards into the engine of the same process.

Each rank casts its shards to the engine's type, all-gathers them in buckets, and copies every gathered bucket straight
into the engine's parameters on a side stream while the next bucket is being gathered.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from colocated_grpo.policy.conversion import Conversion
from colocated_grpo.rollout.engine import LocalEngine
from colocated_grpo.runtime.distributed import World, whole
from colocated_grpo.weights.buckets import (
    Bucket,
    ShardSlice,
    count_shards,
    gather,
    make_buckets,
    shard_slices,
    write_planned,
)
from colocated_grpo.weights.plan import Plan, build_plan
from colocated_grpo.weights.transport import Due, ReloadCheck, TransportCheck, raise_if_reloading_changed


class ColocatedSync:
    """Copies the policy's weights into the engine. Every method is collective, called in lockstep by all ranks.

    The first sync uses the engine's own `load_weights`. A plan is built afterwards, and adopted only if each of its
    views holds, bit for bit, what this first sync has written; otherwise all syncs use `load_weights`. Each sync is
    verified.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        engine: LocalEngine,
        conversion: Conversion,
        world: World,
        *,
        check_every: int,
        constants: Mapping[str, Tensor] | None = None,
        planned: bool = True,
    ) -> None:
        """parameters: sharded tensors by name. conversion: to the tensors that the engine's loader expects.

        check_every: verify every n-th sync; 0: never.
        constants: unsharded tensors that never change. `load_weights` writes these constants; planned syncs do not.
        planned: False always uses the engine's own loader.
        """
        self._parameters = parameters
        self._constants = constants or {}
        self._engine = engine
        self._world = world
        self._conversion = conversion
        self._planned = planned and not engine.transforms_weights
        self._device = world.device
        self._dtype = next(engine.model.parameters()).dtype
        self._check_due = Due(check_every)
        self._transport: TransportCheck | None = None
        self._reload = ReloadCheck(lambda: engine.model, [*parameters, *self._constants], world.device)
        self.plan: Plan | None = None
        """Destination of each parameter. None until the plan is verified, and for models without a valid plan."""
        self._buckets: list[tuple[Bucket, list[ShardSlice]]] = []
        self._loaded_once = False

    @property
    def path(self) -> str:
        """'views' (planned copies) or 'load_weights' (the engine's loader)."""
        return "views" if self.plan is not None else "load_weights"

    @torch.no_grad()
    def sync(self) -> None:
        """Write the policy's weights into the engine. Raises RunError on every rank if the weights have not arrived."""
        if self.plan is not None:
            gathered = ((slices, self._gather(bucket)) for bucket, slices in self._buckets)
            write_planned(gathered, self.plan, self._device)
        else:
            self._engine.load_weights(self._full_tensors())
            if not self._loaded_once:
                self._loaded_once = True
                self._adopt_verified_plan()
        if self._check_due():
            self._verify()

    def _verify(self) -> None:
        if self.plan is None:
            block = self._reload.next_block()
            changed = self._reload.changes(lambda: self._engine.load_weights(self._full_tensors(block)))
            raise_if_reloading_changed(self._world.gather_objects(changed))
            return
        if self._transport is None:
            self._transport = TransportCheck(
                self._parameters, self.plan.targets, self._dtype, self._world, self.plan.is_current
            )
        self._transport.verify()

    def _agree(self, ok: bool) -> bool:
        return all(self._world.gather_objects(ok))

    def _full_tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the engine's loader needs. names: yield only these parameters and constants."""
        for name, parameter in self._parameters.items():
            if names is None or name in names:
                yield from self._conversion.stored(name, whole(parameter.detach().to(self._dtype)).to(self._device))
        for name, constant in self._constants.items():
            if names is None or name in names:
                yield name, constant.to(self._device)

    def _adopt_verified_plan(self) -> None:
        """Set `plan` if its views hold, on every rank and bit for bit, what `load_weights` has just written."""
        plan = None
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        if self._planned:
            plan = build_plan(self._engine.model, shapes, self._engine.tensor_parallel_rank)
        if not self._agree(plan is not None) or plan is None:
            return
        buckets = make_buckets(shapes, count_shards(self._parameters), self._dtype)
        self._buckets = [(bucket, shard_slices(bucket, plan)) for bucket in buckets]
        loaded = [self._is_loaded(*entry) for entry in self._buckets]  # checks every bucket: all ranks join all gathers
        if self._agree(all(loaded)):
            self.plan = plan

    def _is_loaded(self, bucket: Bucket, slices: Sequence[ShardSlice]) -> bool:
        gathered = self._gather(bucket)
        return all(torch.equal(part.destination, part.source(gathered)) for part in slices)

    def _gather(self, bucket: Bucket) -> Tensor:
        return gather(bucket, self._parameters, self._dtype, self._device)
