"""Subjects of the doctor's checks, and faults of a machine that tests make without root."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from colocated_grpo.runtime.program import Launch
from colocated_grpo.tools.doctor.subject import Subject
from tests.support.paths import ROOT

OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")
TWO_H200 = "0, NVIDIA H200, 143771, 0, 580.159.03\n1, NVIDIA H200, 143771, 0, 580.159.03"


def launch_of(**changes: Any) -> Launch:
    values = {
        "gpus": 0,
        "engine_gpus": 0,
        "ranks": max(changes.get("gpus", 0), 1),
        "nodes": 1,
        "node_rank": 0,
        "master_addr": "localhost",
        "master_port": 0,
        "join_timeout": 900,
        "config": "x.yaml",
        "resume": None,
        "log_level": "INFO",
        "log_dir": None,
        "overrides": (),
    }
    return Launch(**(values | changes))


def subject_of(environment: dict[str, str] | None = None, **launch: Any) -> Subject:
    """Return a subject with this machine's environment, changed by `environment`."""
    return Subject(launch=launch_of(**launch), environment={**os.environ, **(environment or {})})


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, output: str, code: int = 0) -> None:
    """Put an nvidia-smi with recorded output into PATH."""
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho {shlex.quote(output)}\nexit {code}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@cache
def _can_mount() -> bool:
    """True if this machine allows file systems of one's own in a user namespace."""
    if shutil.which("unshare") is None:
        return False
    command = [*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


def python_on_small_disk(code: str, mount_point: Path, size: str) -> str:
    """Run Python code where `mount_point` is a file system of `size`, and return its output. Skips if not allowed."""
    if not _can_mount():
        pytest.skip("mounting in a user namespace is not allowed here")
    run = shlex.join([sys.executable, "-c", code])
    script = f"mount -t tmpfs -o size={size} tmpfs {shlex.quote(str(mount_point))} && exec {run}"
    done = subprocess.run([*OWN_MOUNTS, "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
