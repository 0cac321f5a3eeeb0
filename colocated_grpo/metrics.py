"""Statistics that are summed over micro-batches and ranks on the device, and their reduction to numbers.

A mean of means is wrong if micro-batches differ in tokens, so sums and counts are divided only at the end.
"""

import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["mean", "max", "ess"]
AllReduce = Callable[[Tensor], object]
"""Reduces a tensor over ranks in place."""


class Stat(NamedTuple):
    """One statistic in mergeable form: detached 0-dim tensors on the device, or host floats."""

    kind: Kind
    parts: tuple[Tensor | float, ...]

    @classmethod
    def mean(cls, total: Tensor | float, count: Tensor | float) -> "Stat":
        return cls("mean", (total, count))

    @classmethod
    def max(cls, value: Tensor | float) -> "Stat":
        return cls("max", (value,))

    @classmethod
    def ess(cls, total: Tensor | float, total_of_squares: Tensor | float, count: Tensor | float) -> "Stat":
        """Effective sample size as a fraction of `count`: total^2 / (count * total_of_squares); 1 for equal weights."""
        return cls("ess", (total, total_of_squares, count))


_FINISH: dict[Kind, Callable[..., float | None]] = {
    "mean": lambda total, count: total / count if count else None,
    "max": lambda value: None if value == -math.inf else value,
    "ess": lambda total, squares, count: total * total / (count * squares) if count and squares else None,
}
"""The logged number, computed from the reduced parts; None if no rank had data."""


class Metrics:
    """Statistics of one step on one rank. `add` never synchronizes with the device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._stats: dict[str, Stat] = {}

    def add(self, stats: Mapping[str, Stat]) -> None:
        for name, stat in stats.items():
            self._stats[name] = _merge(name, self._stats[name], stat) if name in self._stats else stat

    def only(self, names: Collection[str]) -> "Metrics":
        """Return the statistics of these names. A name must be present on all ranks or on none."""
        chosen = Metrics(self.device)
        chosen._stats = {name: stat for name, stat in self._stats.items() if name in names}
        return chosen

    def ordered(self) -> list[tuple[str, Stat]]:
        return sorted(self._stats.items())


def reduce(metrics: Metrics, all_reduce_sum: AllReduce, all_reduce_max: AllReduce) -> dict[str, float]:
    """Return numbers over all micro-batches and ranks, without names that have no data on any rank.

    Collective: every rank must have the same names, because values are matched by their position in sorted order. Takes
    two all-reduces and one synchronization with the device.
    """
    stats = metrics.ordered()
    maxima = _pack([stat for _, stat in stats if stat.kind == "max"], metrics.device)
    sums = _pack([stat for _, stat in stats if stat.kind != "max"], metrics.device)
    all_reduce_sum(sums)
    all_reduce_max(maxima)
    packed = torch.cat([sums, maxima]).tolist()
    reduced_sums, reduced_maxima = iter(packed[: len(sums)]), iter(packed[len(sums) :])
    values: dict[str, float] = {}
    for name, stat in stats:
        source = reduced_maxima if stat.kind == "max" else reduced_sums
        value = _FINISH[stat.kind](*(next(source) for _ in stat.parts))
        if value is not None:
            values[name] = value
    return values


def _pack(stats: list[Stat], device: torch.device) -> Tensor:
    """Return all parts as one float64 vector: float32 is exact only up to 2^24, fewer than a run's tokens."""
    parts = [as_scalar(part, device) for stat in stats for part in stat.parts]
    return torch.stack(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)


def as_scalar(part: Tensor | float, device: torch.device) -> Tensor:
    """Return a part of a statistic as a 0-dim float64 tensor, without a synchronization with the device."""
    if isinstance(part, Tensor):
        return part.to(device, torch.float64)
    return torch.full((), part, dtype=torch.float64, device=device)  # a fill does not synchronize; a copy would


def _merge(name: str, left: Stat, right: Stat) -> Stat:
    if left.kind != right.kind:
        raise ValueError(f"metric {name!r} is both a {left.kind} and a {right.kind}; use one name per kind")
    combine = _larger if left.kind == "max" else operator.add
    return Stat(left.kind, tuple(combine(a, b) for a, b in zip(left.parts, right.parts, strict=True)))


def _larger(a: Tensor | float, b: Tensor | float) -> Tensor | float:
    if isinstance(a, Tensor):
        return a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)
