"""What one rank makes for all: its value, or its error, reaches every rank."""

from __future__ import annotations

import threading

import pytest

from colocated_grpo.runtime.distributed import World
from tests.support.ranks import run_on_ranks


class NeedsMore(Exception):
    """As errors of HTTP clients: pickle writes it and cannot read it."""

    def __init__(self, message: str, *, response: int) -> None:
        super().__init__(message)
        self.response = response


class HoldsLock(Exception):
    """Pickle cannot write it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


ERRORS = {
    "plain": lambda: KeyError("gone"),
    "needs more": lambda: NeedsMore("gone", response=404),
    "holds a lock": lambda: HoldsLock("gone"),
}


def told(world: World, name: str) -> tuple[str, str, int]:
    """How the error of rank 0 arrives, and that the next collective works."""

    def make() -> None:
        raise ERRORS[name]()

    try:
        world.from_main(make)
    except Exception as error:
        return type(error).__name__, str(error), world.from_main(lambda: 7)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_the_first_rank_reaches_all_of_them_whatever_it_is_made_of(name):
    first, second = run_on_ranks(told, 2, name)
    error = ERRORS[name]()
    assert first == (type(error).__name__, str(error), 7)
    arrived = ("KeyError", "'gone'") if name == "plain" else ("RuntimeError", f"{type(error).__name__}: gone")
    assert second == (*arrived, 7)
