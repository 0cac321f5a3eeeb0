"""A process group of its own between trainer and engine servers, which share no other group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class JoinedGroup:
    """One trainer rank, which is rank 0, and every rank of every engine server."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> None:
        """Wait for all members. Collective. Raises RuntimeError where one does not come within `timeout` seconds."""
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
