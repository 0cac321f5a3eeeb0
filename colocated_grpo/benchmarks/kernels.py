"""Where the device's time goes: the kernels of a piece of work, and the gaps between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

MOST = 16
"""Kernels listed, those with the largest share."""
LONGEST_NAME = 100


def kernel_rows(work: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Kernels and copies of one run of `work`, the longest first, with milliseconds, calls and share of all of them.

    On CPU operators stand for kernels. The last row is all the others together.
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
    parts = [(name[:LONGEST_NAME], [name]) for name in longest[:MOST]] + [("all others", longest[MOST:])]
    rows = []
    for name, names in parts:
        microseconds, calls = (sum(times[n][i] for n in names) for i in range(2))
        rows.append({"kernel": name, "ms": microseconds / 1e3, "calls": calls, "share": microseconds / total})
    return rows


def busy_seconds(rows: list[dict[str, Any]]) -> float:
    """Of all kernels together, as if none ran beside another."""
    return sum(row["ms"] for row in rows) / 1e3
