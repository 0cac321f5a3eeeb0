"""Triton's interpreter, which runs kernels on the CPU. Triton reads the variable when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT


def interpreted(*arguments: str) -> str:
    """Run Python with these arguments in a process that interprets kernels. Returns what it prints."""
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
