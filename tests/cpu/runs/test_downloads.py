"""A model of the Hub whose download breaks: one line that names the model, the reason and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.fake_hub import fake_hub
from tests.support.paths import ROOT
from tests.support.training_runs import settings, tiny_model

NAME = "me/sorts"


def run_with_a_break(file: str, folder: Path) -> tuple[int, list[str]]:
    """Return the exit code of a rank and its lines on stderr. The download of `file` breaks half-way."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings(Path(NAME), output_dir=str(folder / "runs"))))
    with fake_hub() as server:
        server.repositories[NAME] = {path.name: path.read_bytes() for path in tiny_model().iterdir()}
        server.breaks = lambda path: path.endswith(file)
        variables = {**server.variables, "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-m", "colocated_grpo", "--config", str(config)]
        environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=folder)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("file", "code", "begin", "end"),
    [
        ("config.json", 2, "no such folder, not in the local cache, and the Hub cannot be reached (", ")"),
        (
            "model.safetensors",
            1,
            "cannot be downloaded: ReadError",
            "; check network, disk and HF_TOKEN, and start again: files that are complete are kept",
        ),
    ],
)
def test_a_connection_that_breaks_during_a_download_is_one_line(
    file: str, code: int, begin: str, end: str, tmp_path: Path
):
    ended, lines = run_with_a_break(file, tmp_path)

    error = next(line for line in lines if line.startswith("error: "))
    assert error.startswith(f"error: model.name={NAME!r}: {begin}")
    assert error.endswith(end)
    assert ended == code
    assert not [line for line in lines if "Traceback" in line]
    kept = {path.name for path in (tmp_path / "hub").rglob("snapshots/*/*")}
    assert file not in kept
    assert code == 2 or "tokenizer.json" in kept
