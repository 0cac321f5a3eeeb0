"""Kernel-level profile of one training phase (`tracking.profile_step`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

TABLE_ROWS = 40


def profiled(folder: Path | None) -> AbstractContextManager[None]:
    """Profile the block and write trace.json.gz and kernels.txt into `folder`. With None, do nothing."""
    return nullcontext() if folder is None else _profile(folder)


@contextmanager
def _profile(folder: Path) -> Iterator[None]:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities) as recorded:
        yield
    folder.mkdir(parents=True, exist_ok=True)
    order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    averages = recorded.key_averages()
    (folder / "kernels.txt").write_text(averages.table(sort_by=order, row_limit=TABLE_ROWS, max_name_column_width=90))
    recorded.export_chrome_trace(str(folder / "trace.json.gz"))
