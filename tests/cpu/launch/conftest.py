"""A config file and a machine for the launcher's tests."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator

import pytest

from tests.support.training_runs import tiny_model


@pytest.fixture
def config(tmp_path, monkeypatch) -> str:
    """A config file whose model exists, in the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model(), tmp_path / "model")  # some tests write into it
    (tmp_path / "x.yaml").write_text("model: {name: ./model}\nenvironments: [{type: task, name: sorting}]\n")
    return "x.yaml"


@pytest.fixture
def eight_gpus(tmp_path, monkeypatch) -> None:
    """An nvidia-smi that lists eight GPUs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    lines = "".join(f"{number}, NVIDIA H100, 81559, 0, 580.65.06\\n" for number in range(8))
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture(autouse=True)
def restored_log_level() -> Iterator[None]:
    """Restore the level that `--log-level DEBUG` sets for the process: mkdocs warns of less while it is DEBUG."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)
