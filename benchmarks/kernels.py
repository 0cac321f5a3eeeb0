"""Device time by kernel, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

LISTED = 16
"""Kernels in a table, the longest first; the rest are summed."""
LONGEST_NAME = 100


class KernelRow(TypedDict):
    """Total of one kernel over the profiled work."""

    kernel: str
    ms: float
    calls: int
    share: float
    """Fraction of the time of all kernels."""


def kernel_rows(work: Callable[[], object], device: torch.device) -> list[KernelRow]:
    """Profile one run of `work` and return its kernels and copies, the longest first.

    The last row sums all kernels that are not listed. On CPU the rows are operators.
    """
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in recorded.key_averages() if event.device_type == kind]
    times = {e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.count) for e in events}
    longest = sorted(times, key=lambda name: -times[name][0])
    total = sum(time for time, _ in times.values())
    parts = [(name[:LONGEST_NAME], [name]) for name in longest[:LISTED]] + [("all others", longest[LISTED:])]
    rows = []
    for label, names in parts:
        microseconds = sum(times[name][0] for name in names)
        calls = sum(times[name][1] for name in names)
        rows.append(KernelRow(kernel=label, ms=microseconds / 1e3, calls=calls, share=microseconds / total))
    return rows


def busy_seconds(rows: Sequence[KernelRow]) -> float:
    """Return the summed time of all kernels, as if none of them overlapped."""
    return sum(row["ms"] for row in rows) / 1e3
