"""Which rank runs which rollout in which micro-batch. Every rank computes the same answer from the same outlines."""

from __future__ import annotations

from collections.abc import Sequence
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
    side_by_side = sorted(outlines, key=lambda outline: (outline.group, outline.sibling))
    per_rank = _least_per_rank(computed_tokens(outlines), budget, world_size)
    while (bins := _cut(side_by_side, budget, per_rank * world_size)) is None:
        per_rank += 1
    of_ranks = (bins[rank * per_rank : (rank + 1) * per_rank] for rank in range(world_size))
    # Fullest first, as above: what it took from the allocator serves the others too.
    return [sorted(share, key=computed_tokens, reverse=True) for share in of_ranks]


def _cut(side_by_side: Sequence[Outline], budget: int, count: int) -> list[list[Outline]] | None:
    """Micro-batches of consecutive rollouts, each with an even part of the work that is left; None: too few of them."""
    bins: list[list[Outline]] = [[] for _ in range(count)]
    # Most cuts are between siblings, whose beginning then runs once more.
    again = sum(outline.shared for outline in side_by_side) / max(1, len(side_by_side))
    left, at = computed_tokens(side_by_side) + again * (count - 1), 0
    for index, bin in enumerate(bins):
        fair, load, held = left / (count - index), 0, 0.0
        while at < len(side_by_side):
            outline = side_by_side[at]
            known = bin and bin[-1].group == outline.group
            more = outline.length - (outline.shared if known else 0)
            copied = KEY_SHARE * (outline.length - more)
            if bin and (load + more / 2 > fair or held + more + copied > budget):
                break
            bin.append(outline)
            load, held, at = load + more, held + more + copied, at + 1
        siblings_follow = bin and at < len(side_by_side) and side_by_side[at].group == bin[-1].group
        left += (bin[-1].shared if siblings_follow else 0) - again - load
    return bins if at == len(side_by_side) else None
