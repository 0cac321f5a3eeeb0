"""Commands started with a Python without the dependencies name the environment to activate, in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize(
    "command",
    [
        ["run_colocated_grpo.py", "--help"],
        ["-m", "colocated_grpo"],
        ["-m", "colocated_grpo.tools.evaluate", "model"],
        ["-m", "colocated_grpo.tools.doctor"],
    ],
    ids=" ".join,
)
def test_a_python_without_the_dependencies_is_a_line_that_says_what_to_activate(command):
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # -S: without site-packages
    result = subprocess.run([sys.executable, "-S", *command], cwd=ROOT, env=bare, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {sys.executable} has no package pydantic; ")
    assert "activate the environment: source .venv/bin/activate\n" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_python_with_the_dependencies_starts():
    command = [sys.executable, "run_colocated_grpo.py", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
