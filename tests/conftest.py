"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from colocated_grpo.launch.cli import OPENMP_SETTINGS

os.environ.update({**OPENMP_SETTINGS, **os.environ})  # before torch is imported

import pytest
from hypothesis import settings

from colocated_grpo.runtime.distributed import World
from tests.support.ranks import only_rank
from tests.support.small_policy import make_small_model

# A busy machine makes a single example slow now and then, which says nothing about the code.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A process group of one, gone again after the module: vLLM wants to make its own."""
    with only_rank() as world:
        yield world


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_small_model`, each kind of model made once."""
    made: dict[tuple, Path] = {}

    def folder(architecture: str = "qwen3", **settings) -> Path:
        key = (architecture, repr(sorted(settings.items())))
        if key not in made:
            made[key] = make_small_model(tmp_path_factory.mktemp("models") / architecture, architecture, **settings)
        return made[key]

    return folder
