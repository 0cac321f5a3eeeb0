"""Comparison of the engine's weights with the policy's after a sync, bit for bit."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from colocated_grpo.errors import RunError
from colocated_grpo.runtime.distributed import World, first_row, held, local_part, own_rows
from colocated_grpo.types import JsonObject
from colocated_grpo.weights.buckets import count_shards, make_buckets
from colocated_grpo.weights.fingerprints import Part, bits_of, columns_of, fingerprint, rows_of
from colocated_grpo.weights.plan import Plan, Target

SHOWN = 3
"""Maximum number of tensors that an error names."""


class Fingerprints:
    """Computes the fingerprints of a fixed set of parts."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype | None, device: torch.device) -> None:
        """dtype: cast floating-point values to this type first, as a sync does; None: hash them as they are."""
        self._count = len(parts)
        self._dtype = dtype
        self._device = device
        self._on_host = [(index, part) for index, part in enumerate(parts) if not part.values.is_cuda]
        resident = [(index, part) for index, part in enumerate(parts) if part.values.is_cuda]
        self._launches = []
        if resident:
            # Imported here: it needs Triton, which CPU installations lack.
            from colocated_grpo.weights.fingerprint_kernel import plan_launches

            self._launches = plan_launches(resident, dtype)

    def compute(self) -> Tensor:
        """Return the fingerprints, int64 [parts], on the device."""
        found = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        for launch in self._launches:
            launch(found)
        for index, part in self._on_host:
            if self._device.type == "cpu":
                found[index] = fingerprint(part, self._dtype)
            else:
                uploaded = part._replace(values=part.values.to(self._device))
                found[index] = Fingerprints([uploaded], self._dtype, self._device).compute()[0]
        return found


class Summed(NamedTuple):
    """Fingerprints of one side, summed over its ranks. P checkpoint tensors."""

    sums_P: Tensor
    copies_P: Tensor
    """Number of copies of each tensor in the sum: one for each engine, or for each replica of a shard."""

    def differs_from(self, other: "Summed") -> Tensor:
        """Return where the sides hold different bytes: bool [P], on the CPU."""
        return (self.sums_P * other.copies_P != other.sums_P * self.copies_P).cpu()

    def to_json(self) -> JsonObject:
        return {"sums": self.sums_P.tolist(), "copies": self.copies_P.tolist()}

    @classmethod
    def from_json(cls, content: JsonObject, device: torch.device) -> Self:
        return cls(*(torch.tensor(content[key], dtype=torch.int64, device=device) for key in ("sums", "copies")))


class ShardFingerprints:
    """Fingerprints of this rank's shards of the policy, cast to the engine's type."""

    def __init__(self, parameters: Mapping[str, Tensor], dtype: torch.dtype, world: World) -> None:
        """parameters: sharded tensors by name. Collective."""
        self._parameters, self._dtype, self._device = parameters, dtype, world.device
        self._of_held: Fingerprints | None = None
        self._addresses: list[int] = []
        facts = [(local_part(one).numel(), one.shape, first_row(one)) for one in parameters.values()]
        own, shapes, first_rows = zip(*facts, strict=True)
        self._first_rows = dict(zip(parameters, first_rows, strict=True))
        computed = {name: shapes[n] for n, name in enumerate(parameters) if name not in held(parameters)}
        self._computed = make_buckets(computed, count_shards(parameters), dtype)
        """Computed tensors, in groups that are in memory together. Their addresses differ at each call."""
        self.copies = _copies(own, shapes, world)

    @torch.no_grad()
    def compute(self) -> Tensor:
        """Return this rank's contribution, int64 [P], on the device."""
        names = held(self._parameters)
        shards = own_rows(self._parameters, names)
        addresses = [shard.data_ptr() for shard in shards]
        if self._of_held is None or addresses != self._addresses:
            self._of_held = self._fingerprints(names, shards)
            self._addresses = addresses
        found = [self._of_held.compute()]
        for bucket in self._computed:
            found.append(self._fingerprints(bucket.shapes, own_rows(self._parameters, bucket.shapes)).compute())
        return torch.cat(found)

    def _fingerprints(self, names: Iterable[str], shards: Sequence[Tensor]) -> Fingerprints:
        parts = [rows_of(shard, self._first_rows[name]) for name, shard in zip(names, shards, strict=True)]
        return Fingerprints(parts, self._dtype, self._device)


class ViewFingerprints:
    """Fingerprints of the engine's planned views on this rank."""

    def __init__(self, plan: Plan, shapes: Mapping[str, torch.Size], world: World) -> None:
        """shapes: of the checkpoint tensors, by name. Collective."""
        self.plan = plan
        parts = [_part_of(plan.targets[name], shape) for name, shape in shapes.items()]
        self._of_views = Fingerprints(parts, None, world.device)
        self.copies = _copies([part.values.numel() for part in parts], list(shapes.values()), world)

    def compute(self) -> Tensor:
        """Return this rank's contribution, int64 [P], on the engine's device; zeros if the plan is outdated."""
        found = self._of_views.compute()
        return found if self.plan.is_current() else torch.zeros_like(found)


def _part_of(target: Target, shape: torch.Size) -> Part:
    if target.dim == 1:
        return columns_of(target.view, target.start, shape[1])
    return rows_of(target.view, target.start)


def _copies(own: Sequence[int], shapes: Sequence[torch.Size], world: World) -> Tensor:
    """Return the number of copies of each tensor over all ranks. own: number of each tensor's elements on this rank."""
    elements = torch.tensor([shape.numel() for shape in shapes], dtype=torch.int64, device=world.device)
    held = world.sum_(torch.tensor(own, dtype=torch.int64, device=world.device))
    return held.div(elements, rounding_mode="floor")


def every_nth(n: int) -> Callable[[], bool]:
    """Return a function that is True for every n-th call, beginning with the first; never for n = 0."""
    calls = count()
    return lambda: n > 0 and next(calls) % n == 0


class TransportCheck:
    """Compares planned views with the policy's shards. Every method is collective."""

    def __init__(self, parameters: Mapping[str, Tensor], plan: Plan, dtype: torch.dtype, world: World) -> None:
        """plan: has a target for each parameter, by the same names. dtype: the engine's."""
        self._names = list(parameters)
        self._world = world
        self._shards = ShardFingerprints(parameters, dtype, world)
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._views = ViewFingerprints(plan, shapes, world)

    def verify(self) -> None:
        """Raise RunError on every rank unless all engines hold the policy's weights, bit for bit."""
        own = torch.stack([self._shards.compute(), self._views.compute()])
        shards_P, views_P = self._world.sum_(own)
        different_P = Summed(shards_P, self._shards.copies).differs_from(Summed(views_P, self._views.copies))
        raise_if_any(different_P, self._names)


def raise_if_any(different_P: Tensor, names: Sequence[str], where: str = "the engine") -> None:
    """Raise RunError that names the tensors with different bytes, if there are any."""
    wrong = [names[index] for index in different_P.nonzero()[:, 0].tolist()]
    if wrong:
        shown = ", ".join(wrong[:SHOWN]) + (", ..." if len(wrong) > SHOWN else "")
        problem = f"weight sync: {where} does not hold the policy's bytes in {len(wrong)} of {len(names)} tensors"
        advice = "nothing was sampled with them. Report it with this line; freshness.every=0 turns the check off"
        raise RunError(f"{problem} ({shown}); {advice}")


class ReloadCheck:
    """Loads one block of the weights a second time and expects that no byte of the engine changes.

    For engines without planned views. A load is deterministic, so bytes change only where the first load has not
    arrived. Blocks take turns: an engine that receives nothing is detected at once, a single stale block in its turn.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], device: torch.device) -> None:
        """model: the engine's, on this device. names: names of all tensors that a load needs."""
        self._model = model
        self._device = device
        blocks: dict[str, list[str]] = {}
        for name in names:
            blocks.setdefault(_block_of(name), []).append(name)
        self._blocks = list(blocks.values())
        self._turn = 0

    def changes(self, load: Callable[[Sequence[str]], None]) -> list[str]:
        """Return the engine's names of tensors that `load` changes. It gets the names of the block whose turn it is."""
        self._turn = (self._turn + 1) % len(self._blocks)
        before = self._fingerprints()
        load(self._blocks[self._turn])
        after = self._fingerprints()
        return [name for name, fingerprint in after.items() if before.get(name) != fingerprint]

    def _fingerprints(self) -> dict[str, int]:
        tensors = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        tensors = {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}
        found = Fingerprints([bits_of(tensor) for tensor in tensors.values()], None, self._device).compute()
        return dict(zip(tensors, found.tolist(), strict=True))


def _block_of(name: str) -> str:
    """Return the name of the numbered block that a tensor belongs to; empty for embeddings and the like."""
    numbered = re.match(r".*?\.\d+(?=\.)", name)
    return "" if numbered is None else numbered[0]
