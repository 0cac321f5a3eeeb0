"""The batching rules of Atropos' API server: which queued groups make a batch of an exact number of sequences.

Groups are never split. Groups of equal size are collected into packs as large as the largest group in the queue, and a
batch consists of whole packs in the order of their completion. In atroposlib one group of a size that does not divide
the batch therefore stops all others. Here such a group is refused, and where the largest groups do not fill a batch,
smaller ones are packed without them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

EnvId = int | None


def choose_batch(
    sizes: Sequence[int], envs: Sequence[EnvId], batch_size: int, allocations: Mapping[int, float]
) -> list[int]:
    """Return the queue positions of the groups of the next batch; empty when none can be formed.

    sizes, envs: number of sequences and environment of each queued group. allocations: environment -> smallest
    fraction of the batch reserved for it.
    """
    if sum(sizes) < batch_size:
        return []
    for pack_size in sorted(set(sizes), reverse=True):
        small = [position for position, size in enumerate(sizes) if size <= pack_size]
        if allocations:
            chosen = _choose_with_allocations(sizes, envs, small, batch_size, allocations)
        else:
            chosen = _choose_in_order(sizes, small, batch_size)
        if chosen:
            return chosen
    return []


def _choose_in_order(sizes: Sequence[int], positions: Sequence[int], batch_size: int) -> list[int]:
    chosen, total = [], 0
    for position in _in_complete_packs(sizes, positions, max(sizes[position] for position in positions)):
        chosen.append(position)
        total += sizes[position]
        if total >= batch_size:
            break
    return chosen if total == batch_size else []


def _in_complete_packs(sizes: Sequence[int], positions: Sequence[int], pack_size: int) -> list[int]:
    """Return the positions that belong to a complete pack, pack by pack."""
    open_packs: dict[int, list[int]] = defaultdict(list)
    packed: list[int] = []
    for position in positions:
        members = open_packs[sizes[position]]
        members.append(position)
        if len(members) * sizes[position] == pack_size:
            packed += members
            members.clear()
    return packed


def _choose_with_allocations(
    sizes: Sequence[int],
    envs: Sequence[EnvId],
    positions: Sequence[int],
    batch_size: int,
    allocations: Mapping[int, float],
) -> list[int]:
    """Return reserved groups first, then others in queue order. Groups without an environment are ignored."""
    pack_size = max(sizes[position] for position in positions)
    positions_of: dict[int, list[int]] = defaultdict(list)
    for position in positions:
        if (env := envs[position]) is not None:
            positions_of[env].append(position)
    packed = {env: _in_complete_packs(sizes, own, pack_size) for env, own in positions_of.items()}
    counts = {env: int(batch_size * fraction) for env, fraction in allocations.items()}
    reserved = {env: count for env, count in counts.items() if count > 0}
    if any(not packed.get(env) for env in reserved):
        return []
    if (total_reserved := sum(reserved.values())) > batch_size:
        for env, count in reserved.items():
            smallest = min(sizes[position] for position in packed[env])
            reserved[env] = max(smallest, int(count * batch_size / total_reserved))

    chosen: list[int] = []
    total = 0
    for env, count in reserved.items():
        taken = 0
        for position in packed[env]:
            if taken >= count:
                break
            if total + sizes[position] <= batch_size:
                chosen.append(position)
                taken += sizes[position]
                total += sizes[position]
    for position in sorted({position for own in packed.values() for position in own} - set(chosen)):
        if total + sizes[position] <= batch_size:
            chosen.append(position)
            total += sizes[position]
    return chosen if total == batch_size else []


def is_servable(size: int, batch_size: int) -> bool:
    """True if enough groups of this size make a batch."""
    return size > 0 and batch_size % size == 0


def choose_parts(sizes: Sequence[int], group_size: int) -> list[int]:
    """Return positions whose sizes add up to exactly `group_size`, earlier ones preferred; empty if there are none."""
    total, first = 0, []
    for position, size in enumerate(sizes):
        if total + size <= group_size:
            first.append(position)
            total += size
        if total == group_size:
            return first
    # Subset sum. reached[total]: the positions that first added up to it.
    reached: dict[int, list[int]] = {0: []}
    for position, size in enumerate(sizes):
        for total, members in list(reached.items()):
            if total + size <= group_size:
                reached.setdefault(total + size, [*members, position])
    return reached.get(group_size, [])
