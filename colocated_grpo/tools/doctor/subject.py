"""The subject of all checks (this machine, and the flags of a run), and their findings."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

from colocated_grpo.runtime.processes import Gpu, GpuListing, list_gpus, visible
from colocated_grpo.runtime.program import Launch

Status = Literal["ok", "warning", "failed", "skipped"]
IMPORT_SECONDS = 60
# Prints one line of JSON for each import that succeeds; a crash loses only the later lines.
IMPORTS = """
import json, torch
cuda = torch.version.cuda
devices = torch.cuda.device_count() if cuda and torch.cuda.is_available() else 0
print(json.dumps({"torch": torch.__version__, "cuda": cuda, "devices": devices}), flush=True)
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
print(json.dumps({"transformers": transformers.__version__}), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check. `fix` is empty unless the status is warning or failed."""

    status: Status
    detail: str
    fix: str = ""


ok, skipped = partial(Finding, "ok"), partial(Finding, "skipped")
warning, failed = partial(Finding, "warning"), partial(Finding, "failed")


@dataclass(frozen=True, kw_only=True)
class Imports:
    torch: str | None = None
    """Version; None if the import failed."""
    cuda: str | None = None
    """CUDA version of the torch build; None for a CPU build."""
    devices: int = 0
    """GPUs that torch can use."""
    transformers: str | None = None
    error: str = ""
    """Root cause of the first import that failed."""


def import_libraries(environment: Mapping[str, str]) -> Imports:
    """Import torch, then transformers, in a process of their own: a broken build must not end the doctor."""
    command = [sys.executable, "-c", IMPORTS]
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=IMPORT_SECONDS)
        output = done.stdout
        error = root_cause(done.stderr) or f"the process ended with code {done.returncode}"
    except subprocess.TimeoutExpired as expired:
        output, error = expired.stdout or "", f"not finished after {IMPORT_SECONDS} s"
        output = output.decode(errors="replace") if isinstance(output, bytes) else output
    values = {}
    for line in output.splitlines():
        values |= json.loads(line) if line.startswith("{") else {}
    return Imports(**values, error="" if "transformers" in values else error)


def root_cause(log: str) -> str:
    """Return the first exception of a traceback, from which later exceptions were raised; else the last line."""
    lines = log.strip().splitlines()
    exceptions = (line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line))
    return next(exceptions, lines[-1] if lines else "")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Machine under check, and the flags of a run. Slow facts are computed once, by the first check that needs them."""

    launch: Launch
    environment: Mapping[str, str] = field(repr=False)

    @cached_property
    def listing(self) -> GpuListing:
        return list_gpus()

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return visible(self.listing.gpus, self.environment)

    @cached_property
    def imports(self) -> Imports:
        return import_libraries(self.environment)
