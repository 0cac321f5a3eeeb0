"""Runs of `benchmarks.learn` in separate processes, several at a time."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from colocated_grpo.servers.engine_servers import free_ports

MODULE = "benchmarks.learn"


@dataclass(frozen=True, kw_only=True)
class LearningRun:
    """One run in a separate process."""

    name: str
    flags: list[str]
    result: Path

    @property
    def log(self) -> Path:
        return self.result.with_suffix(".log")


def run_jobs(jobs: Sequence[LearningRun], parallel: int, timeout: float, deadline: float) -> list[str]:
    """Run all jobs, `parallel` at a time, and return the names of those without a result."""
    # Chosen together: runs that choose for themselves, seconds before they listen, may choose the same port.
    ports = free_ports(len(jobs))
    with ThreadPoolExecutor(parallel) as pool:
        outcomes = list(pool.map(lambda job, port: run_job(job, port, timeout, deadline), jobs, ports))
    return [job.name for job, done in zip(jobs, outcomes, strict=True) if not done]


def run_job(job: LearningRun, port: int, timeout: float, deadline: float) -> bool:
    """Run a job unless its result exists. Return True if it exists now. Prints one line, or the end of a failed log."""
    if job.result.exists():
        print(f"{job.name}: done before", flush=True)
        return True
    began = time.time()
    limit = min(timeout, deadline - began)
    if limit <= 0:
        print(f"{job.name}: not started, the time is up", flush=True)
        return False
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("w") as log:
        command = [sys.executable, "-m", MODULE, "run", *job.flags]
        log.write(shlex.join(command) + "\n")
        log.flush()
        # In a new session, so that the run's other processes end with it.
        variables = os.environ | {"MASTER_PORT": str(port)}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
        try:
            outcome = f"exit code {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            outcome = f"ended after {time.time() - began:.0f} s"
        _end_session(process)
    lines = job.log.read_text(errors="replace").splitlines()
    if job.result.exists():
        print(f"{job.name}: {time.time() - began:.0f} s; {'; '.join(lines[-2:])}", flush=True)
        return True
    print(f"{job.name}: {outcome}", *(f"  | {line}" for line in lines[-12:]), sep="\n", flush=True)
    return False


def _end_session(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
