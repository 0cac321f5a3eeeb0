"""Assignment of rollouts to ranks and micro-batches. Every rank computes the same plan from the same outlines."""

import math
from collections import deque
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

COPIED_KEY_COST = 0.25
"""Memory of one copy of a token's keys and values, relative to everything kept of the token for the backward pass.
About 1/8 in common models. The margin keeps micro-batches with many copies within the memory measured without."""
GROUPING_THRESHOLD = 0.97
"""Plan by group only if the work drops below this fraction: with prefixes, every layer copies keys and values."""


class Outline(NamedTuple):
    """Size of one rollout, as planning needs it.

    Every rank plans all rollouts of the batch; only the rank that trains a rollout converts it to a `TrainSequence`.
    """

    group: int
    sibling: int
    length: int
    scored: int
    """Number of tokens that the policy sampled."""
    trained: bool
    """False: the tokens are scored but carry no loss, because the completion is truncated and masked."""
    prefix_length: int = 0
    """Leading tokens in common with the sibling before it. If both are in one micro-batch, they are computed once."""

    @property
    def loss_tokens(self) -> int:
        return self.scored if self.trained else 0


Assignment = list[list[list[Outline]]]
"""[rank][micro-batch]: equally many micro-batches on each rank, some of them possibly empty."""


def plan(outlines: Sequence[Outline], budget: int, world_size: int) -> Assignment:
    """Assign rollouts to ranks and micro-batches of at most `budget` tokens, equally many per rank, loads balanced.

    outlines: siblings in the order of `Outline.prefix_length`. They go into the same micro-batch where computing their
    common prefixes once takes less work than balancing rollouts one by one. Each rank gets at least one micro-batch,
    possibly empty, because every rank must join the collectives. No rollout may be longer than the budget.
    """
    individually = _plan_individually([outline._replace(prefix_length=0) for outline in outlines], budget, world_size)
    by_group = _plan_by_group(outlines, budget, world_size)
    return by_group if _work(by_group) < GROUPING_THRESHOLD * _work(individually) else individually


def computed_tokens(micro_batch: Sequence[Outline]) -> int:
    """Return the number of rows in the forward pass: common prefixes count once."""
    shared = (after.prefix_length for before, after in pairwise(micro_batch) if before.group == after.group)
    return sum(outline.length for outline in micro_batch) - sum(shared)


def _work(assignment: Assignment) -> int:
    """Tokens on the critical path: ranks run micro-batches in lockstep, and the fullest micro-batch sets the pace."""
    return sum(max(map(computed_tokens, in_parallel)) for in_parallel in zip(*assignment, strict=True))


def _plan_individually(outlines: Sequence[Outline], budget: int, world_size: int) -> Assignment:
    """Add rollouts, longest first, to the emptiest micro-batch (Graham's LPT rule).

    With many rollouts, the loads differ by less than the length of a short rollout.
    """
    longest_first = sorted(outlines, key=lambda outline: (-outline.length, outline.group, outline.sibling))
    per_rank = _min_per_rank(sum(outline.length for outline in outlines), budget, world_size)
    while (bins := _fill_bins(longest_first, budget, per_rank * world_size)) is None:
        per_rank += 1
    return _distribute(bins, world_size)


def _min_per_rank(tokens: int, budget: int, world_size: int) -> int:
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


def _distribute(bins: list[list[Outline]], world_size: int) -> Assignment:
    """Assign one bin per rank in each round, the fullest bin to the rank with the smallest load so far."""
    load = lambda bin: sum(outline.length for outline in bin)  # noqa: E731
    assignment: Assignment = [[] for _ in range(world_size)]
    totals = [0] * world_size
    fullest_first = sorted(bins, key=load, reverse=True)
    for start in range(0, len(bins), world_size):
        ranks = sorted(range(world_size), key=totals.__getitem__)
        for rank, bin in zip(ranks, fullest_first[start : start + world_size], strict=True):
            assignment[rank].append(bin)
            totals[rank] += load(bin)
    return assignment


def _plan_by_group(outlines: Sequence[Outline], budget: int, world_size: int) -> Assignment:
    """Keep siblings adjacent and cut the list of groups into parts of equal work, give or take one rollout."""
    groups = [list(siblings) for _, siblings in groupby(outlines, key=lambda outline: outline.group)]
    per_rank = _min_per_rank(computed_tokens(outlines), budget, world_size)
    while (bins := _cut(groups, budget, per_rank * world_size)) is None:
        per_rank += 1
    by_rank = (bins[rank * per_rank : (rank + 1) * per_rank] for rank in range(world_size))
    # Fullest first, as in `_distribute`: later micro-batches reuse the memory that the first micro-batch allocated.
    return [sorted(own, key=computed_tokens, reverse=True) for own in by_rank]


def _cut(groups: Sequence[list[Outline]], budget: int, count: int) -> list[list[Outline]] | None:
    """Fill `count` micro-batches with the groups in order, each with an equal part of the remaining work.

    Siblings that do not fit go into the next micro-batch; shorter siblings may still be added. Returns None if `count`
    is too small.
    """
    queue = deque(groups)
    bins: list[list[Outline]] = []
    # Most cuts fall between siblings, whose prefix is then computed once more.
    prefixes = [outline.prefix_length for siblings in groups for outline in siblings[1:]]
    expected_repeat = sum(prefixes) / max(1, len(prefixes))
    remaining_work = sum(map(computed_tokens, groups)) + expected_repeat * (count - 1)
    for remaining in range(count, 0, -1):
        bin = _Bin(target_load=remaining_work / remaining if remaining > 1 else math.inf, budget=budget)
        postponed: list[Outline] = []
        before = 0
        while queue and not postponed:
            siblings = queue.popleft()
            before += computed_tokens(siblings)
            postponed = bin.fill(siblings)
        if postponed:
            queue.appendleft(postponed)
        remaining_work += computed_tokens(postponed) - before - expected_repeat
        bins.append(bin.outlines)
    return None if queue else bins


class _Bin:
    """Micro-batch that is being filled."""

    def __init__(self, target_load: float, budget: int) -> None:
        self.outlines: list[Outline] = []
        self.load = 0
        """Computed tokens."""
        self._memory = 0.0
        """The load plus COPIED_KEY_COST per copied key; limited by the budget."""
        self._target_load = target_load
        self._budget = budget

    def fill(self, siblings: Sequence[Outline]) -> list[Outline]:
        """Add the siblings that fit, and return the others.

        Two siblings with others between them have the shortest of the prefixes in common.
        """
        postponed: list[Outline] = []
        with_added = with_postponed = siblings[0].length
        for outline in siblings:
            with_added, with_postponed = (min(n, outline.prefix_length) for n in (with_added, with_postponed))
            if self._try_add(outline._replace(prefix_length=with_added)):
                with_added = outline.length
            else:
                postponed.append(outline._replace(prefix_length=with_postponed))
                with_postponed = outline.length
        return postponed

    def _try_add(self, outline: Outline) -> bool:
        """Add a rollout if it fits or the micro-batch is empty. Return True if it was added."""
        has_siblings = self.outlines and self.outlines[-1].group == outline.group
        copied = outline.prefix_length if has_siblings else 0
        added = outline.length - copied
        load, memory = self.load + added, self._memory + added + COPIED_KEY_COST * copied
        if self.outlines and (load > self._target_load or memory > self._budget):
            return False
        self.outlines.append(outline)
        self.load, self._memory = load, memory
        return True
