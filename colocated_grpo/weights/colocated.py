"""Weight sync into the engine of the same process, from FSDP2 shards or by sharing one copy of the weights.

From shards, each rank casts them to the engine's type, all-gathers them in buckets, and copies every gathered bucket
straight into the engine's parameters on a side stream while the next bucket is being gathered. One rank copies from its
own parameters, unless they are in host memory. With one copy, the policy computes with the engine's: nothing moves.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from colocated_grpo.errors import RunError
from colocated_grpo.policy.checkpoint_files import Conversion
from colocated_grpo.policy.masters import Weights, adopt
from colocated_grpo.rollout.engine import LocalEngine
from colocated_grpo.runtime.distributed import World, local_part, whole
from colocated_grpo.weights import buckets
from colocated_grpo.weights.plan import SCALE, Plan, Target, build_plan, in_8_bits
from colocated_grpo.weights.transport import ReloadCheck, TransportCheck, every_nth


@dataclass(eq=False)
class ColocatedSync:
    """Copies the policy's weights into the engine. Every method is collective, called in lockstep by all ranks.

    The first sync uses the engine's own `load_weights`. A plan is built afterwards, and adopted only if each of its
    views holds, bit for bit, what the first sync wrote; otherwise all syncs use `load_weights`.
    """

    parameters: Mapping[str, Tensor]
    """Sharded tensors by name."""
    engine: LocalEngine
    conversion: Conversion
    """To the tensors that the engine's loader expects."""
    world: World
    _: KW_ONLY
    check_every: int
    """Verify every n-th sync; 0: never."""
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    """Unsharded tensors that never change. `load_weights` writes them; planned syncs do not."""

    def __post_init__(self) -> None:
        self._sent = self.parameters
        """The parameters as planned syncs send them: where the engine stores 8 bits, in 8 bits."""
        self._may_plan = not self.engine.transforms_weights
        """True until the first sync, which builds the plan."""
        self._device = self.world.device
        self._dtype = next(self.engine.model.parameters()).dtype
        self._check_due = every_nth(self.check_every)
        self._transport: TransportCheck | None = None
        self._reload = ReloadCheck(self.engine.model, [*self.parameters, *self.constants], self._device)
        self.plan: Plan | None = None
        """Destination of each parameter. None until the plan is verified, and for models without a valid plan."""
        self._buckets: list[tuple[buckets.Bucket, list[buckets.ShardSlice]]] = []

    @torch.no_grad()
    def sync(self) -> None:
        """Write the policy's weights into the engine. Raises RunError on every rank if the weights have not arrived."""
        if self.plan is not None:
            values = (
                (slices, buckets.values_of(slices, bucket, self._sent, self._device))
                for bucket, slices in self._buckets
            )
            buckets.write_planned(values, self.plan, self._device)
        else:
            self.engine.load_weights(self._full_tensors())
            if self._may_plan:
                self._may_plan = False
                self._adopt_verified_plan()
        if self._check_due():
            self._verify()

    def _verify(self) -> None:
        if self.plan is None:
            changed = self._reload.changes(lambda block: self.engine.load_weights(self._full_tensors(block)))
            for rank, names in enumerate(self.world.gather_objects(changed)):
                if names:
                    raise RunError(
                        f"weight sync: loading a block a second time changes {names[0]} in the engine of rank {rank}: "
                        "its first load has not arrived, in this sync or an earlier one. Report it with this line; "
                        "freshness.every=0 turns the check off"
                    )
            return
        if self._transport is None:
            self._transport = TransportCheck(self._sent, self.plan, self._dtype, self.world)
        self._transport.verify()

    def _full_tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the engine's loader needs. names: yield only these parameters and constants."""
        for name in self.parameters:
            if names is None or name in names:
                parameter = self.parameters[name].detach().to(self._dtype)
                yield from self.conversion.stored(name, whole(parameter).to(self._device))
        for name, constant in self.constants.items():
            if names is None or name in names:
                yield name, constant.to(self._device)

    def _adopt_verified_plan(self) -> None:
        """Set `plan` if its views hold, on every rank and bit for bit, what `load_weights` has just written."""
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        plan = build_plan(self.engine.model, shapes, self.engine.tensor_parallel_rank)
        if not all(self.world.gather_objects(plan is not None)) or plan is None:
            return
        if plan.in_8_bits:
            self._sent = in_8_bits(self.parameters, plan.in_8_bits, self._dtype, self._device)
        self._buckets = [(bucket, buckets.shard_slices(bucket, plan)) for bucket in self._make_buckets(plan, shapes)]
        loaded = [self._is_loaded(*entry) for entry in self._buckets]  # checks every bucket: all ranks join all gathers
        if all(self.world.gather_objects(all(loaded))):
            self.plan = plan

    def _make_buckets(self, plan: Plan, shapes: Mapping[str, torch.Size]) -> list[buckets.Bucket]:
        """shapes: of the parameters. Each bucket has one type; a weight in 8 bits comes before its scales."""
        scales = {name + SCALE: torch.Size((shapes[name][0], 1)) for name in plan.in_8_bits}
        by_type: dict[torch.dtype, dict[str, torch.Size]] = defaultdict(dict)
        for name, target in plan.targets.items():
            dtype = self._dtype if target.view.is_floating_point() else target.view.dtype
            by_type[dtype][name] = scales[name] if name in scales else shapes[name]
        shards = buckets.count_shards(self.parameters)
        return [bucket for dtype, some in by_type.items() for bucket in buckets.make_buckets(some, shards, dtype)]

    def _is_loaded(self, bucket: buckets.Bucket, slices: Sequence[buckets.ShardSlice]) -> bool:
        gathered = buckets.gather(bucket, self._sent, self._device)
        return all(torch.equal(part.destination, part.source(gathered)) for part in slices)


NO_VERSION = -1
"""policy_version of the opponent's completions."""


@dataclass(eq=False)
class FrozenOpponent:
    """Loads its weights into the engine between two batches, so that no second engine is needed.

    Every method is collective. No request may be running when the weights change.
    """

    policy: Mapping[str, Tensor]
    into_engine: ColocatedSync
    """The sync of the frozen weights, named and sharded like the policy's, in host or device memory."""
    restore_policy: Callable[[], None]
    """Writes the policy's weights into the engine again."""
    refresh_every: int
    """Steps between refreshes; 0: never."""

    @contextmanager
    def plays(self) -> Generator[None]:
        """Sample with the opponent's weights inside the context. The engine must be awake.

        The opponent's weights stay loaded after an error: restoring the policy's weights is collective, and other ranks
        may not have failed.
        """
        self.into_engine.sync()
        self.into_engine.engine.weights_changed(NO_VERSION)
        yield
        self.restore_policy()

    @torch.no_grad()
    def refresh(self, step: int) -> None:
        """Copy the policy's weights if a refresh is due at `step`. A run resumed at `step` repeats the refresh."""
        if self.refresh_every and step and step % self.refresh_every == 0:
            for name, parameter in self.into_engine.parameters.items():
                local_part(parameter).copy_(local_part(self.policy[name]))


class SharedSync:
    """A sync without copies: each optimizer step writes the engine's weights."""

    def __init__(
        self, published: Mapping[str, Tensor], views: Mapping[str, Tensor], world: World, check_every: int
    ) -> None:
        """published: `Weights.published`. views: the engine's tensors, with which the policy computes."""
        self._check_due = every_nth(check_every)
        self._check: TransportCheck | None = None
        masters = {name: master for name, master in published.items() if master.data_ptr() != views[name].data_ptr()}
        if masters:
            targets = {name: Target(view=views[name], dim=0, start=0) for name in masters}
            dtype = next(iter(targets.values())).view.dtype
            plan = Plan(targets=targets, padding=[], places=[])  # the policy holds the views, so they stay the engine's
            self._check = TransportCheck(masters, plan, dtype, world)

    def sync(self) -> None:
        """Wait for the kernels that write the weights.

        An engine in another process does not see the streams of this process. `RolloutEngine.weights_changed`, which
        the caller runs next, drops cached prefixes. Raises RunError if the engine's tensors differ from the masters
        cast to the engine's type.
        """
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if self._check_due() and self._check is not None:
            self._check.verify()


def share(copies: ColocatedSync, weights: Weights) -> SharedSync:
    """Replace the tensors that the policy computes with by views of the engine's parameters.

    copies: the sync of `weights`. The engine's weights must be mapped; its KV cache need not be. Raises RunError if the
    model has no verified plan, or if the policy cannot compute with the engine's tensors.
    """
    copies.sync()  # builds and verifies the plan
    plan = copies.plan
    views = {} if plan is None else {name: target.view for name, target in plan.targets.items()}
    if plan is None or not adopt(weights.model, views):
        problem = "the engine stores this model's weights in another layout than the checkpoint"
        raise RunError(f"weights=shared: {problem}; set weights=copied")
    for rows in plan.padding:
        rows.zero_()  # once is enough: no sync writes to them later
    return SharedSync(weights.published(), views, copies.world, copies.check_every)
