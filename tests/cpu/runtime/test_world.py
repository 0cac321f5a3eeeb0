"""`World.from_main`: rank 0's result, or its exception, reaches every rank."""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future

import pytest

from colocated_grpo.errors import RunError
from colocated_grpo.runtime.distributed import World
from tests.support.ranks import run_on_ranks


class NeedsMore(Exception):
    """Pickle can write it and not read it, like the errors of HTTP clients."""

    def __init__(self, message: str, *, response: int) -> None:
        super().__init__(message)
        self.response = response


class HoldsLock(RuntimeError):
    """Pickle cannot write it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


ERRORS = {
    "plain": lambda: KeyError("gone"),
    "needs more": lambda: NeedsMore("gone", response=404),
    "holds a lock": lambda: HoldsLock("gone"),
}


def error_seen(world: World, name: str, of_user_code: bool) -> tuple[str, str, int]:
    """Type and text of rank 0's error on this rank, and the result of the collective after it."""
    failed = Future[None]()
    failed.set_exception(ERRORS[name]())
    try:
        world.from_main((lambda: failed.result()) if of_user_code else failed.result)
    except Exception as error:
        return type(error).__name__, str(error), world.from_main(lambda: 7)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_on_rank_0_is_raised_on_every_rank_whether_or_not_it_can_be_pickled(name):
    first, second = run_on_ranks(error_seen, 2, name, False)
    error = ERRORS[name]()
    assert first == (type(error).__name__, str(error), 7)
    arrived = ("KeyError", "'gone'") if name == "plain" else ("RuntimeError", f"{type(error).__name__}: gone")
    assert second == (*arrived, 7)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_user_code_on_rank_0_is_the_same_line_with_its_place_on_every_rank(name):
    first, second = run_on_ranks(error_seen, 2, name, True)
    assert first == second
    kind, line, _ = first
    assert kind == "RunError"
    assert re.fullmatch(rf"{type(ERRORS[name]()).__name__}: '?gone'? \(test_world\.py, line \d+\)", line)


def sent_after_an_object_that_cannot_be_pickled(world: World) -> str:
    if world.is_main:
        with pytest.raises(RunError, match=r"another object for all ranks: (AttributeError|PicklingError): Can't"):
            world.broadcast_object(lambda: 1)
    return world.broadcast_object("next")


def test_an_object_of_user_code_that_cannot_be_pickled_raises_one_line():
    assert run_on_ranks(sent_after_an_object_that_cannot_be_pickled, 2) == ["next", "next"]
