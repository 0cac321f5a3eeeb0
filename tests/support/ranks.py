"""Run a function on several ranks of one host: real processes and a real gloo process group."""

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
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colocated_grpo.launch.launcher import child_environment
from colocated_grpo.runtime.distributed import World, init_world, mesh_of_nodes
from colocated_grpo.runtime.program import library_environment

TIMEOUT = 300.0

# Ranks are forked from a server that has imported the slow modules once and has no threads and no process group.
_context = multiprocessing.get_context("forkserver")
_slow_modules = [
    "colocated_grpo.policy.export",
    "colocated_grpo.checkpoint.checkpoints",
    "colocated_grpo.rollout.vllm.vllm_engine",
    "colocated_grpo.trainer",
    "tests.support.engine_modules",
]
# On a GPU host, some imports (flash-linear-attention) initialize CUDA, which a process forked afterwards cannot use.
_context.set_forkserver_preload(["torch"] if torch.cuda.is_available() else _slow_modules)


@cache
def _start_server() -> None:
    """Start the fork server with a rank's environment variables, which the engine's modules read on import."""
    with environment_variables({**library_environment("INFO"), "OPENBLAS_NUM_THREADS": "1"}):
        forkserver.ensure_running()


class RankFailed(AssertionError):
    """A rank raised an exception, died or did not exit in time. The message contains its traceback."""


class RankKilled(RankFailed):
    """A rank was ended by SIGKILL or SIGTERM, which come from outside; its own crash would raise another signal."""


def run_on_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Call `fn(world, *args)` on every rank and return the results in rank order. Both must be picklable.

    The first failing rank is reported, and all other ranks are killed. No process outlives this call.
    """
    try:
        with Ranks(in_process_group, world_size, fn, *args) as ranks:
            return ranks.results(timeout)
    except RankKilled as error:  # a kill by the system, for example out of memory, is not a failure of `fn` yet
        warnings.warn(f"{error}; starting again", stacklevel=2)
    with Ranks(in_process_group, world_size, fn, *args) as ranks:
        return ranks.results(timeout)


def in_process_group(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn(world, *args)` in a process group that no rank leaves before all have finished."""
    world = init_world()
    result = fn(world, *args)
    world.barrier()
    return result


def with_nodes(world: World, ranks_per_node: int) -> World:
    """Return the world with its ranks divided into nodes, each with a replica of the weights. Collective."""
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks_per_node), "LOCAL_RANK": str(world.rank % ranks_per_node)}
    return replace(world, mesh=mesh_of_nodes(world.device, world.control))


class Ranks:
    """`fn(*args)` running on every rank, for tests that interfere. Leaving the context kills the remaining ranks."""

    context = _context
    """Creates events and locks that can be passed to the ranks."""

    def __init__(self, fn: Callable[..., Any], world_size: int, *args: Any) -> None:
        # The store is served here, as by torchrun's agent: ranks may start in any order, and the port is free.
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
        """Return the results in rank order. Raises RankFailed for the first rank that fails."""
        deadline = time.monotonic() + timeout
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        results: dict[int, Any] = {}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(pending.values())} did not exit within {timeout:g} s")
            for pipe in ready:
                rank = pending.pop(pipe)
                results[rank] = self._receive(pipe, rank)
        return [results[rank] for rank in range(len(self.processes))]

    def exit_codes(self, timeout: float) -> list[int | None]:
        """Return the exit codes in rank order, for functions that exit; None for a rank that is still running."""
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
            raise kind(f"rank {rank} died without a traceback: {ending}") from None
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
    except BaseException:  # also SystemExit and KeyboardInterrupt: the test must report them
        pipe.send((False, traceback.format_exc()))
        # Skip the handlers of a normal exit: they could block while a peer is in a collective with this rank.
        os.kill(os.getpid(), signal.SIGKILL)


def start_module(
    module: str,
    arguments: Sequence[str],
    ranks: int,
    stdout: Path,
    stderr: Path,
    environment: Mapping[str, str] | None = None,
) -> Ranks:
    """Run `python -m module` on every rank of a CPU run, with the launcher's variables and `environment` set."""
    for file in (stdout, stderr):
        file.write_text("")
    return Ranks(run_module, ranks, module, list(arguments), ranks, stdout, stderr, dict(environment or {}))


def run_module(
    module: str, arguments: list[str], ranks: int, stdout: Path, stderr: Path, environment: dict[str, str]
) -> None:
    os.environ.update(child_environment(os.environ, 0, ranks, "INFO") | environment)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # the fork server has loaded OpenMP already
    for stream, file in ((sys.stdout, stdout), (sys.stderr, stderr)):
        with file.open("a") as target:
            os.dup2(target.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__")
    except BaseException:  # print the traceback, as the interpreter does for an uncaught exception
        traceback.print_exc()
        raise


def torchrun_environment(rank: int, world_size: int, port: int) -> AbstractContextManager[None]:
    """Set the variables that torchrun sets for a rank whose store is served at `port`."""
    return environment_variables(
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
def environment_variables(values: Mapping[str, str]) -> Generator[None]:
    """Set environment variables for the duration of the context."""
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
def single_rank_group() -> Generator[World]:
    """Initialize a process group with this process as its only rank, for the duration of the context."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with torchrun_environment(0, 1, store.port):
        world = init_world()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for small models, thread synchronization costs more than it saves
    try:
        yield world
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()


def single_rank_world() -> World:
    """Return a World of one rank with a local store and no process group."""
    return World(
        rank=0,
        size=1,
        device=torch.device("cpu"),
        mesh=None,
        store=dist.HashStore(),
        control=None,
        checkpoints=None,
    )
