"""A process group of its own between trainer and engine servers, which share no other group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colocated_grpo.runtime.stores import wait_for_keys
from colocated_grpo.runtime.supervision import named_ranks


class MissingMembers(RuntimeError):
    """Members of a group have not come in time."""

    def __init__(self, ranks: Sequence[int], size: int, timeout: float) -> None:
        """ranks: theirs in the group of `size` members."""
        super().__init__(f"{named_ranks(ranks)} of {size} did not join within {timeout:g} s")
        self.ranks = ranks


class JoinedGroup:
    """One trainer rank, which is rank 0, and every rank of every engine server."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> None:
        """Wait for all members. Collective. Raises MissingMembers where one does not come within `timeout` seconds.

        Raises RuntimeError where members cannot connect to each other. store: new, for this group alone.
        """
        _meet(store, rank, size, timeout)
        limit = timedelta(seconds=timeout)
        self._group: Any  # torch's stubs lack the collectives of backends
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, limit)
        self._store = store  # rank 0's serves the others: it must outlive the group

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Start sending rank 0's values into `tensor` of the other ranks. Wait for the returned work."""
        return self._group.broadcast(tensor, 0)

    def close(self) -> None:
        self._group.shutdown()


def _meet(store: dist.Store, rank: int, size: int, timeout: float) -> None:
    """Wait until all members are here. NCCL's constructor does not: the first broadcast would wait for a dead one."""
    keys = [f"member {member}" for member in range(size)]
    store.set(keys[rank], "")
    missing = wait_for_keys(store, keys, time.monotonic() + timeout)
    if missing:
        raise MissingMembers([keys.index(key) for key in missing], size, timeout)
