"""The kernels that decoding uses on CUDA devices, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytest.importorskip("triton")


def test_the_kernels_equal_plain_arithmetic():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    checks = [sys.executable, "-m", "tests.support.decode_kernels"]
    done = subprocess.run(checks, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
