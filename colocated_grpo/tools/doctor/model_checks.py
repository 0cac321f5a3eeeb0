"""Checks of the model: reachable, complete, and small enough for memory and disk."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from colocated_grpo.settings.model_sizes import sizes_of
from colocated_grpo.tools.doctor.footprint import Placement, RunSizes
from colocated_grpo.tools.doctor.subject import Finding, Subject, failed, failed_line, gib, ok, skipped, warning

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
FULL = 0.9
"""Fraction of the memory above which a run that fits by arithmetic is likely to fail."""
UNKNOWN_SIZES = "the sizes of the model are unknown"
MOST_RANKS = 1024


def check_model(subject: Subject) -> Finding:
    """Read config.json from the model's folder, the Hub's cache or the Hub."""
    if subject.model.json is None:
        fix = "the folder of a saved model, or a name on the Hub (HF_TOKEN, HF_ENDPOINT, without HF_HUB_OFFLINE)"
        return failed_line(subject.model.error, fix)
    return ok(f"{subject.run.model.name}: {subject.model.json.get('model_type', 'unknown type')}")


def check_model_files(subject: Subject) -> Finding:
    """Look for missing and truncated files in a local folder."""
    folder = Path(subject.run.model.name)
    if not folder.is_dir():
        return skipped("downloaded from the Hub when the run starts" if subject.model.json else "no such folder")
    problems = list(incomplete_files(folder))
    if problems:
        return failed("; ".join(problems), f"copy or download {folder} again (hf download NAME --local-dir {folder})")
    return ok(f"{len(list(folder.glob('*.safetensors')))} weight files, complete")


def incomplete_files(folder: Path) -> Iterator[str]:
    if (folder / INDEX).is_file():
        shards = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            yield f"{len(missing)} of {len(shards)} weight files are missing, first {missing[0]}"
    for file in sorted(folder.glob("*.safetensors")):
        size, expected = file.stat().st_size, _expected_size(file)
        if size != expected:
            yield f"{file.name} has {size:,} bytes" + (f" of {expected:,}" if expected else " and no valid header")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield f"no tokenizer ({', '.join(TOKENIZER_FILES)})"


def _expected_size(file: Path) -> int | None:
    """Return the size that the header of a safetensors file implies; None if the header cannot be read."""
    try:
        with file.open("rb") as stream:
            [length] = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                return None
            entries = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error):
        return None
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)


def check_memory(subject: Subject) -> Finding:
    """Compare the memory of GPU or machine with the minimum that the run needs."""
    run = _run_sizes(subject)
    if isinstance(run, str):
        return skipped(run)
    return judge_memory(run, psutil.virtual_memory().available, subject.launch.ranks)


def judge_memory(run: RunSizes, host_bytes: int, ranks_per_node: int) -> Finding:
    """host_bytes: free memory of the machine. ranks_per_node: ranks that use this memory together."""
    need, place = run.footprint(), run.place
    host = host_bytes // ranks_per_node
    what = f"{run.sizes.total / 1e9:.3g} B parameters on {place.ranks} {'GPUs' if place.on_gpu else 'ranks'}"
    device = place.device_bytes if place.on_gpu else host
    shown = (
        f"{what}: {gib(need.training)} while training, {gib(need.generating)} while generating, of {gib(device)} each"
        + (f"; {gib(need.host)} of {gib(host)} host memory per rank" if need.host else "")
    )
    if fits(run, host, FULL):
        return ok(shown)
    if fits(run, host, 1.0):
        return warning(f"{shown}: little is left", memory_fix(run, host))
    return failed(shown, memory_fix(run, host))


def fits(run: RunSizes, host: int, fraction: float) -> bool:
    """host: bytes of host memory for one rank, which on the CPU is also the memory of its device."""
    need, device = run.footprint(), run.place.device_bytes if run.place.on_gpu else host
    return need.device <= fraction * device and need.host <= fraction * host


def memory_fix(run: RunSizes, host: int) -> str:
    """Return settings that would each, on its own, make the run fit by the same arithmetic. host: as in `fits`."""
    smaller = run.smaller().items()
    fitting = [f"{setting} ({gib(one.footprint().device)})" for setting, one in smaller if fits(one, host, FULL)]
    ranks = run.place.ranks
    while run.place.on_gpu and (ranks := 2 * ranks) <= MOST_RANKS:
        if fits(replace(run, place=replace(run.place, ranks=ranks)), host, FULL):
            fitting.append(f"{ranks} such GPUs")
            break
    return " or ".join(fitting) if fitting else "a smaller model, shorter sequences or a GPU with more memory"


def check_disk(subject: Subject) -> Finding:
    """Compare the free space of output_dir with the checkpoints and exports of the run."""
    config = subject.run
    folder = Path(config.output_dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return failed(f"output_dir={config.output_dir!r}: {existing} is not a writable folder", "--output_dir FOLDER")
    free, run = shutil.disk_usage(existing).free, _run_sizes(subject, device_bytes=0)
    if isinstance(run, str):
        return skipped(f"{gib(free)} free in {existing}; {run}")
    need = run.run_folder_bytes()
    shown = f"checkpoints and exports take {gib(need)}; {gib(free)} are free in {existing}"
    if need > free:
        fix = "--output_dir on a larger disk, --checkpoint.keep_last 1, or a larger --checkpoint.export_every"
        return failed(f"output_dir={config.output_dir!r}: {shown}", fix)
    return ok(shown)


def _run_sizes(subject: Subject, device_bytes: int | None = None) -> RunSizes | str:
    """Return the run on its devices, or the reason why its sizes are unknown.

    device_bytes: used in place of the memory of the GPUs, which may be unknown.
    """
    sizes = None if subject.model.json is None else sizes_of(subject.model.json)
    if sizes is None:
        return UNKNOWN_SIZES
    on_gpu = subject.launch.gpus > 0
    if device_bytes is None:
        device_bytes = _gpu_bytes(subject) if on_gpu else psutil.virtual_memory().total
    if device_bytes is None:
        return "the memory of the GPU cannot be read"
    place = Placement(ranks=subject.ranks, on_gpu=on_gpu, device_bytes=device_bytes, nodes=subject.launch.nodes)
    return RunSizes(subject.resolved, sizes, place)


def _gpu_bytes(subject: Subject) -> int | None:
    sizes = [gpu.total for gpu in subject.gpus[: subject.launch.gpus] if gpu.total is not None]
    return min(sizes) if sizes and len(sizes) == subject.launch.gpus else None
