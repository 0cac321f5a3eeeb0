"""Fixtures used by several test files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from colocated_grpo.launch.cli import OPENMP_SETTINGS

os.environ.update({**OPENMP_SETTINGS, **os.environ})  # before torch is imported

import pytest
from hypothesis import settings

from colocated_grpo.runtime.distributed import World
from tests.support.ranks import single_rank_group
from tests.support.small_policy import make_small_model

# On a busy machine single examples are slow now and then, whatever the code does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A process group of one rank. Destroyed after the module, because vLLM initializes its own."""
    with single_rank_group() as world:
        yield world


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_small_model` with a cache: each variant is made once a session."""
    folders: dict[tuple[str, str], Path] = {}

    def folder(architecture: str = "qwen3", **settings) -> Path:
        key = (architecture, repr(sorted(settings.items())))
        if key not in folders:
            folders[key] = make_small_model(tmp_path_factory.mktemp("models") / architecture, architecture, **settings)
        return folders[key]

    return folder
