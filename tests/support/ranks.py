"""Running a function on several ranks of one host: real processes, real gloo."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colocated_grpo.launch.cli import library_environment
from colocated_grpo.launch.launcher import child_environment
from colocated_grpo.runtime.distributed import World, init_world

TIMEOUT = 90.0

# Ranks are forked from a server that has imported the slow modules once and holds no threads and no process group.
_context = multiprocessing.get_context("forkserver")
_slow = [
    "colocated_grpo.policy.export",
    "colocated_grpo.checkpoint",
    "colocated_grpo.rollout.vllm.engine",
    "colocated_grpo.trainer",
    "tests.support.engine_modules",
]
# An engine that is imported beside a GPU may wake the driver, which does not survive a fork.
_context.set_forkserver_preload(_slow[:2] if torch.cuda.is_available() else _slow)


@cache
def _start_server() -> None:
    """In the environment of a rank, which the engine's modules read when they are imported."""
    with set_in_environment({**library_environment("INFO"), "OPENBLAS_NUM_THREADS": "1"}):
        forkserver.ensure_running()


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time. The message holds its traceback."""


class RankKilled(RankFailed):
    """A rank was ended by somebody else's signal: a crash of its own goes by another one."""


def run_on_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """`fn(world, *args)` on every rank; the results in rank order. `fn` and `args` must be picklable.

    The first rank that fails ends all of them and is shown. No process outlives this call.
    """
    try:
        with Ranks(in_a_world, world_size, fn, *args) as ranks:
            return ranks.results(timeout)
    except RankKilled as error:  # by the machine: that says nothing of `fn`, unless it happens again
        warnings.warn(f"{error}; starting again", stacklevel=2)
    with Ranks(in_a_world, world_size, fn, *args) as ranks:
        return ranks.results(timeout)


def in_a_world(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(world, *args)` in a process group that no rank leaves before all have ended."""
    world = init_world()
    result = fn(world, *args)
    world.barrier()
    return result


class Ranks:
    """`fn(*args)` under way on every rank, for tests that interfere. Leaving the context kills what is left."""

    context = _context
    """Makes events and locks that may be passed to the ranks."""

    def __init__(self, fn: Callable[..., Any], world_size: int, *args: Any) -> None:
        # The store lives here, as it lives in torchrun's agent: no rank has to be the first, and no port is guessed.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _start_server()
        self.processes = []
        self._pipes: list[Connection] = []
        for rank in range(world_size):
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_run_rank, args=(there, rank, world_size, self._store.port, fn, args), daemon=True
            )
            process.start()
            there.close()
            self.processes.append(process)
            self._pipes.append(here)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def results(self, timeout: float = TIMEOUT) -> list[Any]:
        deadline = time.monotonic() + timeout
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        results: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(waiting.values())} did not end within {timeout:g} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                results[rank] = self._receive(pipe, rank)
        return [results[rank] for rank in range(len(self.processes))]

    def exit_codes(self, timeout: float) -> list[int | None]:
        """In rank order, for functions that end their process; None of a rank that has not ended by then."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def _receive(self, pipe: Connection, rank: int) -> Any:
        try:
            succeeded, payload = pipe.recv()
        except EOFError:
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            kind = RankKilled if code in (-signal.SIGKILL, -signal.SIGTERM) else RankFailed
            raise kind(f"rank {rank} died without a word: {ending}") from None
        if not succeeded:
            raise RankFailed(f"rank {rank} failed:\n{payload}")
        return torch.load(io.BytesIO(payload), weights_only=False)


def _run_rank(
    pipe: Connection, rank: int, world_size: int, port: int, fn: Callable[..., Any], args: Sequence[Any]
) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    try:
        with torchrun_environment(rank, world_size, port):
            payload = io.BytesIO()
            torch.save(fn(*args), payload)
        pipe.send((True, payload.getvalue()))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:  # whatever it is, the test that waits must hear of it
        pipe.send((False, traceback.format_exc()))
        # A peer may be blocked in a collective with this rank: leave at once, without the handlers of a normal exit.
        os.kill(os.getpid(), signal.SIGKILL)


def start_module(
    module: str,
    arguments: Sequence[str],
    ranks: int,
    stdout: Path,
    stderr: Path,
    environment: Mapping[str, str] | None = None,
) -> Ranks:
    """`python -m module` on every rank of a CPU run, in the environment that the launcher gives and `environment`."""
    for file in (stdout, stderr):
        file.write_text("")
    return Ranks(_run_module, ranks, module, list(arguments), ranks, stdout, stderr, dict(environment or {}))


def _run_module(
    module: str, arguments: list[str], ranks: int, stdout: Path, stderr: Path, environment: dict[str, str]
) -> None:
    os.environ.update(child_environment(os.environ, 0, ranks, "INFO") | environment)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP has read its variable long ago
    for stream, file in ((sys.stdout, stdout), (sys.stderr, stderr)):
        with file.open("a") as target:
            os.dup2(target.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__")
    except BaseException:  # as an interpreter would say that ends by it
        traceback.print_exc()
        raise


def torchrun_environment(rank: int, world_size: int, port: int) -> AbstractContextManager[None]:
    """The variables that torchrun sets for a rank whose agent serves the store at `port`."""
    return set_in_environment(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )


@contextmanager
def set_in_environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def only_rank() -> Iterator[World]:
    """This process as a world of one, for as long as the context is open."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with torchrun_environment(0, 1, store.port):
        world = init_world()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small lose more by waiting for threads than they gain
    try:
        yield world
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()
