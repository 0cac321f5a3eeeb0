"""The kernels that decoding uses on CUDA devices, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]


def test_the_kernels_equal_plain_arithmetic():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    checks = [sys.executable, "-m", "decode_kernels"]
    done = subprocess.run(checks, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
