"""The one-file example learns, and stays short enough to read from top to bottom."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from colocated_grpo.tools.make_model import main as make_model
from tests.support.paths import ROOT

EXAMPLE = ROOT / "docs/examples/minimal_grpo.py"
MAX_LINES = 300
STEPS = 16


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of the example on a model of 0.1 M parameters with half of the quickstart's warm start."""
    model = tmp_path_factory.mktemp("minimal") / "model"
    lessons = ["--shape", "tiny", "--task", "sorting", "--steps", "150", "--lr", "4e-3"]
    assert make_model([str(model), *lessons]) == 0
    return run("--model", str(model), "--steps", str(STEPS), "--lr", "1e-3", folder=model.parent)


def run(*flags: str, folder: Path) -> str:
    command = [sys.executable, str(EXAMPLE), *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(value) for value in re.findall(pattern + r"\s*([-+.\de]+)", text)]


@pytest.mark.slow
def test_the_example_raises_the_held_out_reward(output):
    [before] = numbers("held-out reward before:", output)
    [after] = numbers("held-out reward after:", output)
    assert 0.1 < before < 0.5
    assert after > before + 0.1


@pytest.mark.slow
def test_the_engine_of_the_example_samples_from_its_policy(output):
    mismatches = numbers(re.escape("|policy - sampler|="), output)
    assert len(mismatches) == STEPS
    assert max(mismatches) < 1e-5


def test_the_example_is_short_enough_to_read():
    assert len(EXAMPLE.read_text().splitlines()) <= MAX_LINES


def test_the_example_uses_the_package_only_to_make_its_model():
    assert re.findall(r"^\s*(?:from|import) (colocated_grpo\S*)", EXAMPLE.read_text(), re.MULTILINE) == [
        "colocated_grpo.tools.make_model"
    ]
