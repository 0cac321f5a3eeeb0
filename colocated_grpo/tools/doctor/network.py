"""Checks of the network: free ports, names of nodes, a collective between two processes."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from colocated_grpo.launch.arguments import DEFAULT_MASTER_PORT
from colocated_grpo.runtime.program import python_path
from colocated_grpo.tools.doctor.subject import Finding, Subject, failed, ok, skipped

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
PORT_FIX = "lsof -i :{port} and stop that process, or set {setting} to another port"


def check_ports(subject: Subject) -> Finding:
    """Bind the ports on which the run will listen."""
    ports = list(listening_ports(subject))
    for setting, host, port in ports:
        if reason := _cannot_listen(host, port):
            holder = _holder(port)
            return failed(f"{setting}={port}: {reason}{holder}", PORT_FIX.format(port=port, setting=setting))
    return (
        ok(f"free: {', '.join(str(port) for _, _, port in ports)}") if ports else skipped("the run opens no fixed port")
    )


def listening_ports(subject: Subject) -> Iterator[tuple[str, str, int]]:
    """Yield (setting, host, port) for each port that this node of the run listens on."""
    launch, config = subject.launch, subject.run
    if launch.master_port is not None and launch.node_rank == 0:
        yield "--master-port", "", launch.master_port
    if config.atropos is not None and launch.node_rank == 0:
        index, server = config.environments.index(config.atropos), config.atropos.server
        for number, port in enumerate([server.port, *server.more_ports]):
            name = "port" if number == 0 else f"more_ports.{number - 1}"
            yield f"--environments.{index}.server.{name}", server.host, port


def _cannot_listen(host: str, port: int) -> str | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return None


def _holder(port: int) -> str:
    """Return ' (process 12: command)' for the process that listens on the port, if this user may see it."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid:
                return f" (process {connection.pid}: {shlex.join(psutil.Process(connection.pid).cmdline())[:80]})"
    return ""


def check_hostnames(subject: Subject) -> Finding:
    """Resolve the address of node 0."""
    launch = subject.launch
    if launch.nodes == 1:
        return skipped("one node")
    address = _resolve(launch.master_addr)
    if address is None:
        return failed(f"--master-addr={launch.master_addr}: does not resolve", "the IP address of node 0")
    if ipaddress.ip_address(address).is_loopback:
        return failed(
            f"--master-addr={launch.master_addr}: is {address}, which other nodes cannot reach",
            "the IP address of node 0 (hostname -I), the same on every node",
        )
    return ok(f"{launch.master_addr} is {address}, port {launch.master_port or DEFAULT_MASTER_PORT}")


def _resolve(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0]).partition("%")[0]
    except (OSError, UnicodeError):
        return None


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
        ranks = [_start(rank, backend, Path(folder) / "store", log, environment) for rank, log in enumerate(logs)]
        try:
            deadline = time.monotonic() + COLLECTIVE_SECONDS
            codes = [rank.wait(max(0.0, deadline - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            return f"no result after {COLLECTIVE_SECONDS} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        failures = [log.read_text(errors="replace") for log, code in zip(logs, codes, strict=True) if code]
    return _summary(failures[0]) if failures else None


def _start(rank: int, backend: str, store: Path, log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", ALL_REDUCE, str(rank), backend, str(store)]
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=os.sep)


def _summary(log: str) -> str:
    """Return the last line, after NCCL's first warning if there is a warning."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    warnings = [line for line in lines if "NCCL WARN" in line]
    return "; ".join(dict.fromkeys([*warnings[:1], *lines[-1:]])) or "no message"
