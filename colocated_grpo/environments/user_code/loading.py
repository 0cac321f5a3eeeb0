"""Loading of user code by names in the config, with one-line errors, and event loops on threads of their own."""

import asyncio
import importlib
import importlib.util
import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from hashlib import sha256
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import ValidationError

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.errors import in_one_line, shortened
from colocated_grpo.runtime.user_code import innermost, lines_of_error
from colocated_grpo.settings.errors import masked
from colocated_grpo.types import JsonObject

T = TypeVar("T")
MAX_ERROR_CHARACTERS = 200


def one_line(error: BaseException) -> str:
    """Return an error's type and message, cut to MAX_ERROR_CHARACTERS, and the line of user code that raised."""
    shown = shortened(in_one_line(error), MAX_ERROR_CHARACTERS)
    own = innermost(lines_of_error(error))
    return shown if own is None else f"{shown} ({own.place})"


@contextmanager
def errors_named(key: str, kind: type[Exception] = EnvironmentSetupError) -> Generator[None]:
    """Convert the exceptions of user code or a library to `kind`, with one line that begins with `key`.

    An error of this kind has such a line already.
    """
    try:
        yield
    except kind:
        raise
    except (Exception, SystemExit) as error:
        raise kind(f"{key}: {one_line(error)}") from error


def load_object(path: str, key: str) -> Any:
    """Import the object at 'package.module:object' or 'folder/file.py:object'."""
    location, separator, name = path.rpartition(":")
    if not separator or not location or not name:
        raise EnvironmentSetupError(f"{key}: {path!r} is not of the form module:object or path/to/file.py:object")
    try:
        if location.endswith(".py"):
            module = _load_file(Path(location))
        else:
            make_importable(os.getcwd())
            module = importlib.import_module(location)
    except (Exception, SystemExit) as error:
        extra = "; install it with: pip install 'colocated-grpo[trl]'" if getattr(error, "name", "") == "trl" else ""
        raise EnvironmentSetupError(f"{key}: cannot import {location!r}: {one_line(error)}{extra}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        own = [
            other
            for other, value in inspect.getmembers(module, callable)
            if not other.startswith("_") and str(getattr(value, "__module__", None)).startswith(module.__name__)
        ]
        raise unknown_name(key, f"object of {location!r}", name, own) from None


def load_function(path: str, key: str) -> Callable[..., Any]:
    """Import a function as `load_object` does."""
    return check_callable(load_object(path, key), path, key)


def check_callable(found: Any, name: str, key: str) -> Callable[..., Any]:
    if not callable(found):
        raise EnvironmentSetupError(f"{key}: {name!r} is of type {type(found).__name__}, not a function")
    return found


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no such file {path}")
    # One module per file, so that a task and a reward in the same file use the same globals.
    name = f"user_code_{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    make_importable(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # None only for unknown suffixes
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def import_optional(module: str, package: str, key: str) -> ModuleType:
    """Import a module of an optional package. If the package is missing, the error names the install command."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        advice = f"install it with: pip install {package}"
        raise EnvironmentSetupError(f"{key}: cannot import {error.name!r}; {advice}") from None


def make_importable(folder: str) -> None:
    """Append the folder to sys.path. It comes last, so that a user's file cannot shadow an installed package."""
    if folder not in sys.path:
        sys.path.append(folder)


def construct(factory: Callable[..., T], args: JsonObject, key: str) -> T:
    """Return factory(**args). Any exception becomes EnvironmentSetupError."""
    with errors_named(f"{key}: args={masked(args)}"):
        try:
            return factory(**args)
        except ValidationError as error:
            raise EnvironmentSetupError(f"{key}: {_first_problem(error, factory, args)}") from None


def _first_problem(error: ValidationError, factory: Callable[..., object], args: JsonObject) -> str:
    problem = error.errors()[0]
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"unknown argument {name!r}; {_nearest(name, signature(factory).parameters)}"
    if problem["type"] == "missing":
        return f"args.{name}: required, but not given"
    message = problem["msg"].removeprefix("Value error, ")
    return f"args.{name}={masked(problem['input'], name)!r}: {message}" if name else f"args: {message}"


def unique_names(names: Iterable[str], separator: str) -> list[str]:
    """Return the names, with a number added to repeated names."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}{separator}{seen[name]}")
    return unique


def unknown_name(key: str, what: str, name: str, valid: Iterable[str]) -> EnvironmentSetupError:
    """Return the error for a name that is not in `valid`. The error suggests the nearest valid name."""
    return EnvironmentSetupError(f"{key}: unknown {what} {name!r}; {_nearest(name, valid)}")


def _nearest(name: str, valid: Iterable[str]) -> str:
    valid = sorted(valid)
    near = get_close_matches(name, valid, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"valid: {', '.join(valid) or 'none'}"


GRACE = 2.0
"""A loop that runs no callback for this many seconds counts as blocked."""


def start_loop(name: str) -> asyncio.AbstractEventLoop:
    """Run a new event loop on a daemon thread called `name`."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=[loop], name=name, daemon=True).start()
    return loop


def retire_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Stop the loop and its thread once its last task has ended, so that a long run does not accumulate threads."""
    asyncio.run_coroutine_threadsafe(_stop_when_idle(), loop)


class ReusableLoop:
    """One loop for calls from many threads: an HTTP client of user code works only on the loop that first used it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        """Return the running loop. The first call starts it."""
        with self._lock:
            if self._loop is None:
                self._loop = start_loop("async-rewards")
            return self._loop

    def retire_if_blocked(self) -> None:
        """Retire the loop if it runs no callback within GRACE. Later calls then start a new loop instead of hanging."""
        with self._lock:
            if self._loop is None:
                return
            responded = threading.Event()
            self._loop.call_soon_threadsafe(responded.set)
            if not responded.wait(GRACE):
                retire_loop(self._loop)
                self._loop = None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    stopped = False
    while not stopped:
        # asyncio re-raises these two exceptions from run_forever(), which would end all other tasks. The caller that
        # awaits the task receives the exception.
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
            stopped = True
    loop.close()


async def _stop_when_idle() -> None:
    """Stop the running loop when no other task is left."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    asyncio.get_running_loop().stop()
