"""Which rank runs which rollout in which micro-batch. Every rank computes the same answer from the same outlines."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from colocated_grpo.errors import RunError

KEY_SHARE = 0.25
"""Memory of one copy of a token's keys and values, over that of all it leaves for the backward pass. A little more than
it is in common models (1/8), so that micro-batches with many copies stay within what was measured without any."""
WORTH_SHARING = 0.97
"""Sharing copies keys and values in every layer: it pays where it saves more than this part of the work leaves."""


class Outline(NamedTuple):
    """A rollout as planning sees it; only the rank that trains it turns its tokens into arrays."""

    group: int
    sibling: int
    length: int
    scored: int
    """Tokens that the policy sampled."""
    trained: bool
    """False: its tokens are scored but carry no loss (a truncated completion that is masked)."""
    shared: int = 0
    """Tokens at the beginning that all its siblings have too; they run once for those that run together."""

    @property
    def loss_tokens(self) -> int:
        return self.scored if self.trained else 0


Shares = list[list[list[Outline]]]
"""[rank][micro-batch]: equally many micro-batches a rank, some of them possibly empty."""


def plan(outlines: Sequence[Outline], budget: int, world_size: int) -> Shares:
    """Deal rollouts to ranks and micro-batches: none above `budget` tokens, equally many a rank, loads balanced.

    Siblings come together where running their common beginning once takes less than balancing rollouts one by one.
    At least one micro-batch a rank, possibly empty: a rank without work still joins the collectives.
    """
    longest = max((outline.length for outline in outlines), default=0)
    if longest > budget:
        raise RunError(
            f"batch.max_tokens_per_micro_batch={budget}: a rollout of {longest} tokens cannot be "
            "packed; it was sampled before the run was resumed with less room"
        )
    apart = _apart([outline._replace(shared=0) for outline in outlines], budget, world_size)
    together = _together(outlines, budget, world_size)
    return together if _work(together) < WORTH_SHARING * _work(apart) else apart


def computed_tokens(micro_batch: Sequence[Outline]) -> int:
    """Rows of one forward pass: beginnings that siblings share once."""
    shared = {outline.group: outline.shared for outline in micro_batch}
    return sum(outline.length - outline.shared for outline in micro_batch) + sum(shared.values())


def _work(shares: Shares) -> int:
    """Tokens that everybody waits for: ranks run their micro-batches in step, and the fullest sets the pace."""
    return sum(max(map(computed_tokens, abreast)) for abreast in zip(*shares, strict=True))


def _apart(outlines: Sequence[Outline], budget: int, world_size: int) -> Shares:
    """Longest first into the emptiest micro-batch (Graham's LPT rule): with many rollouts they end up differing by less
    than a short one."""
    longest_first = sorted(outlines, key=lambda outline: (-outline.length, outline.group, outline.sibling))
    per_rank = _least_per_rank(sum(outline.length for outline in outlines), budget, world_size)
    while (bins := _fill_bins(longest_first, budget, per_rank * world_size)) is None:
        per_rank += 1
    return _deal(bins, world_size)


def _least_per_rank(tokens: int, budget: int, world_size: int) -> int:
    return max(1, -(-tokens // (budget * world_size)))


def _fill_bins(longest_first: Sequence[Outline], budget: int, count: int) -> list[list[Outline]] | None:
    bins: list[list[Outline]] = [[] for _ in range(count)]
    loads = [0] * count
    for outline in longest_first:
        emptiest = min(range(count), key=loads.__getitem__)
        if loads[emptiest] + outline.length > budget:
            return None
        bins[emptiest].append(outline)
        loads[emptiest] += outline.length
    return bins


def _deal(bins: list[list[Outline]], world_size: int) -> Shares:
    """Fullest bin to the rank with the least so far, among the ranks that still lack one this round."""
    load = lambda bin: sum(outline.length for outline in bin)  # noqa: E731
    shares: Shares = [[] for _ in range(world_size)]
    totals = [0] * world_size
    fullest_first = sorted(bins, key=load, reverse=True)
    for start in range(0, len(bins), world_size):
        ranks = sorted(range(world_size), key=totals.__getitem__)
        for rank, bin in zip(ranks, fullest_first[start : start + world_size], strict=True):
            shares[rank].append(bin)
            totals[rank] += load(bin)
    return shares


def _together(outlines: Sequence[Outline], budget: int, world_size: int) -> Shares:
    """Siblings side by side, cut where a micro-batch has its share of the work: ranks differ by less than a rollout."""
    longest_first = sorted(outlines, key=lambda outline: (outline.group, -outline.length, outline.sibling))
    families = [list(siblings) for _, siblings in groupby(longest_first, key=lambda outline: outline.group)]
    per_rank = _least_per_rank(computed_tokens(outlines), budget, world_size)
    while (bins := _cut(families, budget, per_rank * world_size)) is None:
        per_rank += 1
    of_ranks = (bins[rank * per_rank : (rank + 1) * per_rank] for rank in range(world_size))
    # Fullest first, as above: what it took from the allocator serves the others too.
    return [sorted(share, key=computed_tokens, reverse=True) for share in of_ranks]


def _cut(families: Sequence[list[Outline]], budget: int, count: int) -> list[list[Outline]] | None:
    """Families one after the other into micro-batches, each with an even part of the work left; None: too few of them.

    What no longer fits of the family at a border, where shorter siblings may, goes on in the next one.
    """
    queue = deque(families)
    bins: list[list[Outline]] = []
    # Most borders are between siblings, whose beginning then runs once more.
    again = sum(family[0].shared for family in families) / max(1, len(families))
    left = sum(map(computed_tokens, families)) + again * (count - 1)
    for remaining in range(count, 0, -1):
        bin = _Bin(fair=left / remaining if remaining > 1 else math.inf, budget=budget)
        rest: list[Outline] = []
        while queue and not rest:
            family = queue.popleft()
            rest = [outline for outline in family if not bin.takes(outline)]
        if rest:
            queue.appendleft(rest)
        begun_again = rest[0].shared if rest and bin.holds_siblings_of(rest[0]) else 0
        left += begun_again - again - bin.load
        bins.append(bin.outlines)
    return None if queue else bins


class _Bin:
    """A micro-batch while it is filled."""

    def __init__(self, fair: float, budget: int) -> None:
        self.outlines: list[Outline] = []
        self.load = 0
        """Tokens that it computes."""
        self._held = 0.0
        """Those, and the part of a token that copies of keys are worth."""
        self._fair = fair
        self._budget = budget

    def holds_siblings_of(self, outline: Outline) -> bool:
        return bool(self.outlines) and self.outlines[-1].group == outline.group

    def takes(self, outline: Outline) -> bool:
        """Take it if there is room, or nothing yet."""
        known = outline.shared if self.holds_siblings_of(outline) else 0
        load, held = self.load + outline.length - known, self._held + outline.length - known + KEY_SHARE * known
        if self.outlines and (load > self._fair or held > self._budget):
            return False
        self.outlines.append(outline)
        self.load, self._held = load, held
        return True
