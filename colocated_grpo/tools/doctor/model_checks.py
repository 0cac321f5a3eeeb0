"""Checks of the model: reachable, complete, and small enough for memory and disk."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from colocated_grpo.settings.lora import LoRAConfig
from colocated_grpo.settings.model_sizes import Sizes, sizes_of
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.doctor.footprint import Footprint, Placement, footprint, run_folder_bytes
from colocated_grpo.tools.doctor.results import Finding, failed, failed_line, gib, ok, skipped, warning
from colocated_grpo.tools.doctor.subject import Subject

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
FULL = 0.9
"""Fraction of the memory above which a run that fits by arithmetic is likely to fail."""
UNKNOWN_SIZES = "the sizes of the model are unknown"
MOST_RANKS = 1024


def check_model(subject: Subject, config: Config) -> Finding:
    """Read config.json from the model's folder, the Hub's cache or the Hub."""
    if subject.model.json is None:
        fix = "the folder of a saved model, or a name on the Hub (HF_TOKEN, HF_ENDPOINT, without HF_HUB_OFFLINE)"
        return failed_line(subject.model.error, fix)
    return ok(f"{config.model.name}: {subject.model.json.get('model_type', 'unknown type')}")


def check_model_files(subject: Subject, config: Config) -> Finding:
    """Look for missing and truncated files in a local folder."""
    folder = Path(config.model.name)
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


def check_memory(subject: Subject, config: Config) -> Finding:
    """Compare the memory of GPU or machine with what the run needs at least."""
    sizes = _sizes(subject)
    place = _placement(subject)
    if sizes is None or place is None:
        return skipped(UNKNOWN_SIZES if sizes is None else "the memory of the GPU cannot be read")
    config = subject.resolved or config
    return judge_memory(config, sizes, place, psutil.virtual_memory().available, subject.launch.ranks)


def judge_memory(config: Config, sizes: Sizes, place: Placement, host_bytes: int, ranks_per_node: int) -> Finding:
    """host_bytes: free memory of the machine. ranks_per_node: ranks that use it together."""
    need = footprint(config, sizes, place)
    device, host = _limits(place, host_bytes, ranks_per_node)
    what = f"{sizes.total / 1e9:.3g} B parameters on {place.ranks} {'GPUs' if place.on_gpu else 'ranks'}"
    shown = (
        f"{what}: {gib(need.training)} while training, {gib(need.generating)} while generating, of {gib(device)} each"
        + (f"; {gib(need.host)} of {gib(host)} host memory per rank" if need.host else "")
    )
    if _fits(need, device, host, 1.0):
        if _fits(need, device, host, FULL):
            return ok(shown)
        return warning(f"{shown}: little is left", memory_fix(config, sizes, place, host_bytes, ranks_per_node))
    return failed(shown, memory_fix(config, sizes, place, host_bytes, ranks_per_node))


def _limits(place: Placement, host_bytes: int, ranks_per_node: int) -> tuple[int, int]:
    """Return the bytes of device and of host memory for one rank. On the CPU both are the same memory."""
    host = host_bytes // ranks_per_node
    return (place.device_bytes, host) if place.on_gpu else (host, host)


def _fits(need: Footprint, device: int, host: int, fraction: float) -> bool:
    return need.device <= fraction * device and need.host <= fraction * host


def memory_fix(config: Config, sizes: Sizes, place: Placement, host_bytes: int, ranks_per_node: int) -> str:
    """Return the settings that would make the run fit by the same arithmetic, each alone."""
    device, host = _limits(place, host_bytes, ranks_per_node)
    fitting = []
    for setting, changed in smaller_runs(config).items():
        need = footprint(changed, sizes, place)
        if _fits(need, device, host, FULL):
            fitting.append(f"{setting} ({gib(need.device)})")
    ranks = place.ranks
    while place.on_gpu and (ranks := 2 * ranks) <= MOST_RANKS:
        more = replace(place, ranks=ranks)
        if _fits(footprint(config, sizes, more), device, host, FULL):
            fitting.append(f"{ranks} such GPUs")
            break
    return " or ".join(fitting) if fitting else "a smaller model, shorter sequences or a GPU with more memory"


def smaller_runs(config: Config) -> dict[str, Config]:
    """Return settings that save memory, and the config with each; those that are set already are left out."""
    policy, engine = config.policy, config.engine
    lora = policy.lora or LoRAConfig()
    changes: dict[str, dict[str, Any]] = {}
    if policy.lora is None:
        changes["--policy.offload_optimizer true"] = {"policy": {"offload_optimizer": True}}
        changes["--policy.lora {}"] = {"policy": {"lora": lora, "cpu_offload": False}}
        changes["--policy.cpu_offload true"] = {"policy": {"cpu_offload": True}}
    else:
        changes["--policy.lora.base_on_host true"] = {
            "policy": {"lora": lora.model_copy(update={"base_on_host": True})}
        }
    if policy.replicate is not None:
        changes["--policy.replicate null"] = {"policy": {"replicate": None}}
    if engine.gpu_memory_utilization is not None:
        changes["--engine.gpu_memory_utilization null"] = {"engine": {"gpu_memory_utilization": None}}
    if engine.kv_cache_memory_bytes is not None:
        changes["--engine.kv_cache_memory_bytes null"] = {"engine": {"kv_cache_memory_bytes": None}}
    if not engine.sleep:
        changes["--engine.sleep true"] = {"engine": {"sleep": True}}
    return {setting: _changed(config, change) for setting, change in changes.items()}


def _changed(config: Config, change: Mapping[str, Mapping[str, Any]]) -> Config:
    sections = {name: getattr(config, name).model_copy(update=dict(values)) for name, values in change.items()}
    return config.model_copy(update=sections)


def check_disk(subject: Subject, config: Config) -> Finding:
    """Compare the free space of output_dir with the checkpoints and exports of the run."""
    folder = Path(config.output_dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return failed(f"output_dir={config.output_dir!r}: {existing} is not a writable folder", "--output_dir FOLDER")
    free, sizes = shutil.disk_usage(existing).free, _sizes(subject)
    if sizes is None:
        return skipped(f"{gib(free)} free in {existing}; {UNKNOWN_SIZES}")
    place = _placement(subject) or Placement(ranks=subject.ranks, on_gpu=subject.launch.gpus > 0, device_bytes=0)
    need = run_folder_bytes(subject.resolved or config, sizes, place)
    shown = f"checkpoints and exports take {gib(need)}; {gib(free)} are free in {existing}"
    if need > free:
        fix = "--output_dir on a larger disk, --checkpoint.keep_last 1, or a larger --checkpoint.export_every"
        return failed(f"output_dir={config.output_dir!r}: {shown}", fix)
    return ok(shown)


def _sizes(subject: Subject) -> Sizes | None:
    return None if subject.model.json is None else sizes_of(subject.model.json)


def _placement(subject: Subject) -> Placement | None:
    """Return where the ranks are; None if the memory of the GPUs is unknown."""
    if not subject.launch.gpus:
        total = psutil.virtual_memory().total
        return Placement(ranks=subject.ranks, on_gpu=False, device_bytes=total, nodes=subject.launch.nodes)
    sizes = [gpu.total for gpu in subject.gpus[: subject.launch.gpus] if gpu.total is not None]
    if not sizes or len(sizes) < subject.launch.gpus:
        return None
    return Placement(ranks=subject.ranks, on_gpu=True, device_bytes=min(sizes), nodes=subject.launch.nodes)
