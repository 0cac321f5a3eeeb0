"""Which queued groups make a batch of exactly so many sequences. The rules of Atropos' API server, indices in and out.

Groups are never split. Groups of one size are collected into packs as large as the largest group of the queue, and a
batch is made of whole packs in the order in which they became complete. So a group size that does not divide the
largest one is never served, and a batch size that is no multiple of the largest one is never reached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

Env = int | None


def choose_batch(sizes: Sequence[int], envs: Sequence[Env], batch_size: int, least: Mapping[int, float]) -> list[int]:
    """Positions in the queue of the groups of the next batch; empty while there is none.

    sizes, envs: sequences and environment of each queued group. least: share of the batch owed to an environment.
    """
    if not sizes or sum(sizes) < batch_size:
        return []
    if least:
        return _with_allocations(sizes, envs, batch_size, least)
    chosen, total = [], 0
    for position in _packed(sizes, range(len(sizes)), max(sizes)):
        chosen.append(position)
        total += sizes[position]
        if total >= batch_size:
            break
    return chosen if total == batch_size else []


def _packed(sizes: Sequence[int], positions: Sequence[int], pack: int) -> list[int]:
    """The positions that belong to a complete pack, pack by pack."""
    open_packs: dict[int, list[int]] = defaultdict(list)
    packed: list[int] = []
    for position in positions:
        members = open_packs[sizes[position]]
        members.append(position)
        if len(members) * sizes[position] == pack:
            packed += members
            members.clear()
    return packed


def _with_allocations(
    sizes: Sequence[int], envs: Sequence[Env], batch_size: int, least: Mapping[int, float]
) -> list[int]:
    """First what is owed, then the rest in the order of the queue. Groups without an environment are passed over."""
    pack = max(sizes)
    mine = defaultdict(list)
    for position, env in enumerate(envs):
        if env is not None:
            mine[env].append(position)
    packed = {env: _packed(sizes, positions, pack) for env, positions in mine.items()}
    owed = {env: int(batch_size * share) for env, share in least.items() if int(batch_size * share) > 0}
    if any(not packed.get(env) for env in owed):
        return []
    if (total_owed := sum(owed.values())) > batch_size:
        for env, count in owed.items():
            smallest = min(sizes[position] for position in packed[env])
            owed[env] = max(smallest, int(count * batch_size / total_owed))

    chosen: list[int] = []
    total = 0
    for env, count in owed.items():
        taken = 0
        for position in packed[env]:
            if taken >= count:
                break
            if total + sizes[position] <= batch_size:
                chosen.append(position)
                taken += sizes[position]
                total += sizes[position]
    for position in sorted({p for positions in packed.values() for p in positions} - set(chosen)):
        if total + sizes[position] <= batch_size:
            chosen.append(position)
            total += sizes[position]
    return chosen if total == batch_size else []


def parts_of_a_group(sizes: Sequence[int], wanted: int) -> list[int]:
    """Positions whose sizes add up to exactly `wanted`, earlier ones preferred; empty if there are none."""
    total, first = 0, []
    for position, size in enumerate(sizes):
        if total + size <= wanted:
            first.append(position)
            total += size
        if total == wanted:
            return first
    # reached[s]: the positions that first added up to s
    reached: dict[int, list[int]] = {0: []}
    for position, size in enumerate(sizes):
        for total, members in list(reached.items()):
            if total + size <= wanted:
                reached.setdefault(total + size, [*members, position])
    return reached.get(wanted, [])
