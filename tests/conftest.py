"""Fixtures used by several test files."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from colocated_grpo.runtime.program import OPENMP_SETTINGS

# Before torch is imported. For the small models of the tests, a second thread costs more CPU time than it saves; the
# launcher, too, keeps a number that is set.
os.environ.update({**OPENMP_SETTINGS, "OMP_NUM_THREADS": "1", **os.environ})

import pytest
from hypothesis import settings

from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.program import frozen_imports
from tests.support.ranks import single_rank_group
from tests.support.small_policy import make_small_model

# In the background of a script this process ignores SIGINT, and so would the runs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine single examples are slow now and then, whatever the code does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without garbage collection: a quarter of the time that collecting the suite takes."""
    with frozen_imports():
        return (yield)


def pytest_unconfigure() -> None:
    """Let the interpreter free the imported modules at its end: nanobind prints a list of what is left."""
    gc.unfreeze()


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
