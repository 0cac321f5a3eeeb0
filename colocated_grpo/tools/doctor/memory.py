"""Checks of memory and disk space by the arithmetic of `settings.run_sizes`."""

from __future__ import annotations

import os
from dataclasses import replace

import psutil

from colocated_grpo.errors import ConfigError
from colocated_grpo.settings.adapter_files import with_adapter_settings
from colocated_grpo.settings.config_json import read_config_json
from colocated_grpo.settings.model_sizes import sizes_of
from colocated_grpo.settings.run_sizes import Placement, RunSizes, free_disk, gib
from colocated_grpo.tools.doctor.subject import Finding, Subject, failed, ok, skipped, warning

FULL = 0.9
"""Fraction of the memory above which a run that fits by arithmetic is likely to fail."""
MOST_RANKS = 1024


def check_memory(subject: Subject) -> Finding:
    """Compare the memory of GPU or machine with the minimum that the run needs."""
    run, available = _run_sizes(subject), psutil.virtual_memory().available
    return skipped(run) if isinstance(run, str) else judge_memory(run, available, subject.launch.ranks)


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
    config = subject.config
    assert config is not None  # checks of a run have a config
    existing, free = free_disk(config.output_dir)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return failed(f"output_dir={config.output_dir!r}: {existing} is not a writable folder", "--output_dir FOLDER")
    run = _run_sizes(subject, device_bytes=0)
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
    config = subject.config
    assert config is not None  # checks of a run have a config
    try:
        sizes = sizes_of(read_config_json(config.model))
        config = with_adapter_settings(config)
    except ConfigError as error:
        return str(error)
    if sizes is None:
        return "the sizes of the model are unknown"
    gpus = subject.launch.gpus
    if device_bytes is None and not gpus:
        device_bytes = psutil.virtual_memory().total
    elif device_bytes is None:
        known = [gpu.total for gpu in subject.gpus[:gpus] if gpu.total is not None]
        if len(known) < gpus:
            return "the memory of the GPU cannot be read"
        device_bytes = min(known)
    place = Placement(ranks=subject.ranks, on_gpu=gpus > 0, device_bytes=device_bytes, nodes=subject.launch.nodes)
    return RunSizes(config, sizes, place)
