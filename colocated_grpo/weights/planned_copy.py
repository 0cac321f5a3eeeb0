"""Planned writes of a weight sync: gathered buckets are copied straight into the engine's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from colocated_grpo.weights.buckets import ShardSlice
from colocated_grpo.weights.plan import Plan


def write_planned(gathered: Iterable[tuple[Sequence[ShardSlice], Tensor]], plan: Plan, device: torch.device) -> None:
    """Copy every bucket's slices to their destinations while the next bucket is gathered, and clear the plan's padding.

    gathered: slices and values of each bucket.
    """
    copy = SideStreamCopy(device)
    for slices, values in gathered:
        copy([part.destination for part in slices], [part.source(values) for part in slices])
    copy.wait()
    for rows in plan.padding:
        rows.zero_()


class SideStreamCopy:
    """Copies on a side stream on CUDA, in parallel with the next gather; plain copies on other devices."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: torch.Event | None = None

    def __call__(self, destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        if self._stream is None:
            torch._foreach_copy_(list(destinations), list(sources))
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(list(destinations), list(sources))
            for source in sources:
                source.record_stream(self._stream)
        if self._last is not None:
            self._last.synchronize()  # each gather queued further ahead would need one more bucket of memory
        self._last = self._stream.record_event()

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
