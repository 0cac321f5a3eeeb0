"""Measured limits of a device: copy bandwidth, matmul rate and all-gather bandwidth, as floors for measured times.

Measure before other allocations fill the device: the buffers need a few GiB, which are freed afterwards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

DENSE_BF16_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""Data-sheet rates by exact device name: the PCIe and NVL versions of these chips are slower."""

COPY_BYTES = {"cuda": 2 << 30, "cpu": 32 << 20}
"""Far beyond the last-level cache on CUDA; on CPU only large enough to take milliseconds."""
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
GATHER_BYTES = {"cuda": 512 << 20, "cpu": 4 << 20}
"""Contribution of each rank to the measured all-gather."""
REPEATS, WARMUP = 10, 3


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Measured rates of one rank's device."""

    copy_bytes_per_second: float
    """Bytes read plus bytes written."""
    matmul_flops_per_second: float
    """Dense bf16 on CUDA, fp32 on CPU."""
    gather_bytes_per_second: float | None
    """Bytes that one rank receives in an all-gather; None for a single rank."""
    datasheet_flops_per_second: float | None
    """None for a device whose data sheet is not listed here."""

    @property
    def peak_flops_per_second(self) -> float:
        """Denominator of MFU: the data sheet's rate where known, else the measured one."""
        return self.datasheet_flops_per_second or self.matmul_flops_per_second

    def seconds_for_bytes(self, read_and_written: float) -> float:
        return read_and_written / self.copy_bytes_per_second

    def seconds_for_flops(self, flops: float) -> float:
        return flops / self.matmul_flops_per_second

    def seconds_for_gather(self, received: float) -> float:
        """Return the seconds of an all-gather in which this rank receives `received` bytes; 0 for a single rank."""
        return received / self.gather_bytes_per_second if self.gather_bytes_per_second else 0.0

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)


def measure_roofline(device: torch.device) -> Roofline:
    """Measure all rates. Collective if a process group exists, because ranks share the host's links in a run too."""
    roofline = Roofline(
        copy_bytes_per_second=_copy_rate(device),
        matmul_flops_per_second=_matmul_rate(device),
        gather_bytes_per_second=_gather_rate(device),
        datasheet_flops_per_second=_datasheet_flops(device),
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return roofline


def median_seconds(
    work: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = REPEATS,
    warmup: int = WARMUP,
    align: Callable[[], object] | None = None,
) -> float:
    """Return the median of `repeats` runs after `warmup` discarded ones.

    A run is timed from an idle device to the end of its last kernel.
    align: called before each run, untimed. If `work` has collectives, pass `barrier`, or waiting for late ranks counts.
    """
    return statistics.median(seconds_of(work, device, repeats=repeats, warmup=warmup, align=align))


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of paired times."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def seconds_of(
    work: Callable[[], object],
    device: torch.device,
    *,
    repeats: int,
    warmup: int,
    align: Callable[[], object] | None = None,
) -> list[float]:
    """Return the seconds of each run; arguments as in `median_seconds`."""
    timed = _seconds_on_cuda if device.type == "cuda" else _seconds_on_cpu
    seconds = []
    for _ in range(warmup + repeats):
        if align is not None:
            align()
        seconds.append(timed(work, device))
    return seconds[warmup:]


def _seconds_on_cuda(work: Callable[[], object], device: torch.device) -> float:
    # The device is idle when the first event is queued, so the interval includes the host time before the first kernel.
    torch.cuda.synchronize(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _seconds_on_cpu(work: Callable[[], object], _device: torch.device) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy_seconds(destination: Tensor, source: Tensor) -> float:
    """Return the median seconds of one plain copy between tensors of one device."""
    return median_seconds(lambda: destination.copy_(source), destination.device)


def gather_seconds(gathered: Tensor, own: Tensor) -> float:
    """Return the median seconds of one all-gather of flat tensors over the default process group. Collective."""
    return median_seconds(
        lambda: dist.all_gather_into_tensor(gathered, own), own.device, align=lambda: barrier(own.device)
    )


def barrier(device: torch.device) -> None:
    """Barrier over all ranks; no-op without a process group. Collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1, device=device))


def _copy_rate(device: torch.device) -> float:
    size = COPY_BYTES[device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    return 2 * size / copy_seconds(torch.empty_like(source), source)


def _matmul_rate(device: torch.device) -> float:
    size = MATMUL_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # Random values: a product of zeros draws less power, so the chip would clock higher than it does on real data.
    left, right = torch.randn(2, size, size, device=device).to(dtype).unbind(0)
    out = torch.empty_like(left)
    return 2 * size**3 / median_seconds(lambda: torch.mm(left, right, out=out), device)


def _gather_rate(device: torch.device) -> float | None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return None
    own = torch.zeros(GATHER_BYTES[device.type], dtype=torch.uint8, device=device)
    gathered = torch.empty(ranks * own.numel(), dtype=torch.uint8, device=device)
    return (ranks - 1) * own.numel() / gather_seconds(gathered, own)


def _datasheet_flops(device: torch.device) -> float | None:
    return DENSE_BF16_FLOPS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
