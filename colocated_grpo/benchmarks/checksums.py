"""Share of checksums in the time of a save: `python -m colocated_grpo.benchmarks.checksums --megabytes 540`.

Writes a checkpoint with the trainer's writer and with torch's own, which computes no checksums, in turn. Then computes
the checksums of an exported folder of the same size. Checksums of a save need a second processor core: on a machine
whose cores are busy they take longer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from colocated_grpo.benchmarks.harness import main_here
from colocated_grpo.benchmarks.roofline import Roofline, median_ratio
from colocated_grpo.checkpoint.writer import ChecksummedWriter
from colocated_grpo.runtime.checksums import write_checksums
from colocated_grpo.types import JsonObject

TENSOR_BYTES = 16 << 20
"""Size of each tensor: that of a large matrix."""
WRITERS = {"none": dcp.FileSystemWriter, "xxh3": ChecksummedWriter}
"""Checksums -> the writer."""


def main(arguments: Sequence[str] | None = None) -> int:
    return main_here("checksums", arguments, parser(), measure)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=540, help="size of a checkpoint")
    parser.add_argument("--saves", type=int, default=12, help="checkpoints of each kind")
    parser.add_argument(
        "--folder", type=Path, help="existing folder of the disk to measure (default: of temporary files)"
    )
    parser.add_argument("--json", type=Path, help="result file to write")
    return parser


def measure(options: argparse.Namespace, _device: torch.device, _roofline: Roofline) -> JsonObject:
    load = os.getloadavg()[0]
    tensors = random_tensors(options.megabytes * 10**6)
    gigabytes = sum(tensor.nbytes for tensor in tensors.values()) / 10**9
    seconds: dict[str, list[float]] = {kind: [] for kind in WRITERS}
    with tempfile.TemporaryDirectory(prefix="benchmark-checksums-", dir=options.folder) as scratch:
        folder = Path(scratch) / "step"
        save_seconds(tensors, "xxh3", folder)  # warm-up: imports, the first growth of the file system
        for number in range(options.saves):
            for kind in sorted(WRITERS, reverse=number % 2 == 1):
                seconds[kind].append(save_seconds(tensors, kind, folder))
        exported = [export_seconds(tensors, Path(scratch) / "export") for _ in range(options.saves)]
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    row = {
        "gigabytes": gigabytes,
        "save_seconds": medians["xxh3"],
        "without_checksums_seconds": medians["none"],
        "ratio": median_ratio(seconds["xxh3"], seconds["none"]),
        "export_seconds_per_gigabyte": statistics.median(exported) / gigabytes,
    }
    return {"load_average_before": load, "rows": [row], "seconds": seconds | {"export": exported}}


def random_tensors(size: int) -> dict[str, Tensor]:
    """Return float32 tensors of about `size` bytes in total."""
    entries = min(size, TENSOR_BYTES) // 4
    return {f"model.{index}": torch.randn(entries) for index in range(max(1, size // TENSOR_BYTES))}


def save_seconds(tensors: dict[str, Tensor], kind: str, folder: Path) -> float:
    """Save a checkpoint, which is on the disk when this returns, and delete it."""
    folder.mkdir()
    began = time.perf_counter()
    dcp.save(tensors, storage_writer=WRITERS[kind](folder), no_dist=True)
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


def export_seconds(tensors: dict[str, Tensor], folder: Path) -> float:
    """Return the seconds for the checksums of an export that was just written."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    began = time.perf_counter()
    write_checksums(folder)
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
