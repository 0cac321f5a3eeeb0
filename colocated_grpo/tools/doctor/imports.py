"""Imports of torch and transformers in a process of their own: a broken build must not end the doctor."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

SECONDS = 60
# Prints one line of JSON for each import that succeeds; a crash loses only the later ones.
SCRIPT = """
import json, torch
cuda = torch.version.cuda
devices = torch.cuda.device_count() if cuda and torch.cuda.is_available() else 0
print(json.dumps({"torch": torch.__version__, "cuda": cuda, "devices": devices}), flush=True)
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
print(json.dumps({"transformers": transformers.__version__}), flush=True)
"""


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
    """Import torch, then transformers."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=dict(environment), capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return _read(text, f"not finished after {SECONDS} s")
    return _read(done.stdout, root_cause(done.stderr) or f"the process ended with code {done.returncode}")


def root_cause(log: str) -> str:
    """Return the first exception of a traceback, which later ones were raised from; else the last line."""
    lines = log.strip().splitlines()
    exceptions = (line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line))
    return next(exceptions, lines[-1] if lines else "")


def _read(output: str, error: str) -> Imports:
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    values = {name: value for part in found for name, value in part.items()}
    return Imports(**values, error="" if "transformers" in values else error)
