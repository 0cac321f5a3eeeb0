"""The start of every program of this package: streams, arguments, variables, logging, and its place among the ranks.

Standard library only: variables that torch and vLLM read when they are imported have to be set first.
"""

from __future__ import annotations

import argparse
import gc
import io
import logging
import os
import re
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from colocated_grpo.runtime.verdict import USAGE_ERROR, first_report, report

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOG_LEVEL_VARIABLE = "COLOCATED_GRPO_LOG_LEVEL"
OPENMP_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
"""Variables that libgomp reads when it is loaded: idle OpenMP threads spin for microseconds, then sleep. By default
they spin long enough to take cores from other ranks and programs. Without spinning, each short wait costs a sleep."""
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
LAST_PORT = 65535
ANY_PORT = "0"
"""MASTER_PORT of a single rank: its store takes any free port, as no other rank connects."""
URLS_VARIABLE = "COLOCATED_GRPO_ENGINE_URLS"
"""Addresses of the servers, separated by spaces, for ranks whose config names none."""
KEY_VARIABLE = "COLOCATED_GRPO_ENGINE_API_KEY"
"""Their API key, new in each launch: other users of the machine can reach its ports."""
DESCRIPTORS = 65_536
"""Requested soft limit: more than all connections and files of one run."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"error: {message.removeprefix('argument ')}\n")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The part of a run that one launcher starts: all ranks of one node."""

    gpus: int
    """GPUs of this node; 0 trains on the CPU."""
    engine_gpus: int
    """Those of them, the last ones, that engine servers use."""
    ranks: int
    """Processes that train on this node."""
    nodes: int
    node_rank: int
    master_addr: str
    master_port: int | None
    """None: a single node, on any free port."""
    join_timeout: int
    """Seconds to wait for the other nodes."""
    config: str
    resume: str | None
    log_level: str
    log_dir: Path | None
    """Folder for server.log and trainer.log."""
    overrides: tuple[str, ...]


def prepare_streams() -> None:
    """Make printing safe if a standard stream is closed, or its encoding lacks a character of the text."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # Occupy the closed descriptor, or the next file opened would get its number and receive printed text.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def set_up_logging(log_level: str, *, prefix: str = "") -> None:
    """Log at this level. prefix: of every line."""
    logging.basicConfig(format=f"{prefix}%(levelname)s %(name)s: %(message)s")
    if log_level == "DEBUG":
        logging.getLogger().setLevel(logging.DEBUG)
    else:  # a user cannot act on the warnings that libraries log when they are imported
        for library in ("vllm", "bitsandbytes"):  # PEFT imports bitsandbytes
            logging.getLogger(library).setLevel(logging.ERROR)
        warnings.simplefilter("ignore", FutureWarning)
    # It has a handler of its own: every retry of a download would be shown twice.
    logging.getLogger("huggingface_hub").propagate = False
    logging.getLogger("colocated_grpo").setLevel(log_level)


def prepare_libraries(log_level: str, *, prefix: str = "") -> None:
    """Set what libraries read when they are imported, and log at this level. prefix: of every line."""
    for name, value in library_environment(log_level).items():
        os.environ.setdefault(name, value)
    set_up_logging(log_level, prefix=prefix)


def parse_rank_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of a program that is a rank, under torchrun, under srun or alone, and overrides of settings.

    Sets torchrun's variables. Exits with one line where they or the arguments are invalid.
    """
    prepare_streams()
    options, overrides = parser.parse_known_args(arguments)
    os.environ.update(rank_environment(os.environ))
    if problem := environment_problem(os.environ):
        parser.error(problem)
    return options, overrides


def library_environment(log_level: str) -> dict[str, str]:
    """Return default values of variables that libraries read when they are imported. Callers keep the user's values."""
    debug = log_level == "DEBUG"
    return {
        "NCCL_DEBUG": "INFO" if debug else "WARN",
        "TORCH_DISTRIBUTED_DEBUG": "INFO" if debug else "OFF",
        "TOKENIZERS_PARALLELISM": "false",
        **OPENMP_SETTINGS,
        "TORCH_CPP_LOG_LEVEL": "INFO" if debug else "ERROR",
        # vLLM (0.32) turns these messages on: a line for each setting that Triton tries while it tunes a kernel.
        "TRITON_PRINT_AUTOTUNING": "1" if debug else "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "DEBUG" if debug else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def python_path(environment: Mapping[str, str]) -> str:
    """Return PYTHONPATH with this package first, so that a child finds it without an installation."""
    return os.pathsep.join([PACKAGE_ROOT, *filter(None, [environment.get("PYTHONPATH")])])


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Import without garbage collection, and exclude all objects so far from it: modules are never freed.

    Otherwise each of many collections would look at all of them again.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def error_text(lines: Sequence[str]) -> list[str]:
    """Return the lines as they are printed. Indented lines belong to the one above."""
    return [line if line.startswith("  ") else f"error: {line}" for line in lines]


def raise_descriptor_limit() -> None:
    """Raise the soft limit to `DESCRIPTORS`, or to the hard limit where that is lower.

    Most systems start a process with 1,024. Episodes and rewards that call services can use all of them, and then no
    checkpoint can be written.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_client_connections() -> int:
    """Return how many connections a server may accept: three quarters of the limit. The rest is for the run."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (DESCRIPTORS if soft == resource.RLIM_INFINITY else soft) * 3 // 4


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables if RANK is not set: derived from those of srun, or those of a single rank."""
    if "RANK" in environment:
        return {}
    # Only srun sets SLURM_STEP_NUM_TASKS. A batch script without it runs once, whatever SLURM_NTASKS says.
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        return _slurm_environment(environment)
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": ANY_PORT,
    }


def environment_problem(environment: Mapping[str, str]) -> str | None:
    """Return one line about missing or invalid torchrun variables, which another tool may have set; else None."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            return f"RANK={environment['RANK']!r}: set, but {name} is not; unset RANK, or start with torchrun"
        if name != "MASTER_ADDR" and not environment[name].isdecimal():
            return f"{name}={environment[name]!r}: must be a whole number"
    single = environment["WORLD_SIZE"] == "1"
    if not (0 if single else 1) <= int(environment["MASTER_PORT"]) <= LAST_PORT:
        return f"MASTER_PORT={environment['MASTER_PORT']}: must be a port, 1-{LAST_PORT}"
    if int(environment["RANK"]) >= int(environment["WORLD_SIZE"]):
        return f"RANK={environment['RANK']}: must be less than WORLD_SIZE={environment['WORLD_SIZE']}"
    return None


def _slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    def step_or_job(name: str, default: str) -> str:
        # A job step may use fewer tasks and nodes than its job.
        return environment.get(f"SLURM_STEP_{name}") or environment.get(f"SLURM_{name}") or default

    tasks = environment["SLURM_STEP_NUM_TASKS"]
    job = re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or "0"
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": re.split(r"\D", step_or_job("TASKS_PER_NODE", tasks))[0],  # "4(x2)" on two equal nodes
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(step_or_job("NODELIST", "127.0.0.1")),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20000 + int(job) % 20000),
    }


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: 'gpu[03-07,12],login' -> 'gpu03'."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist)
    return "".join(part or "" for part in found.groups()) if found else nodelist


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup."""
    hangup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT] + ([] if hangup_ignored else [signal.SIGHUP])


def exit_on_stop_signals(ending: Callable[[], str]) -> None:
    """End this process at once on a stop signal, with exit code 128 + its number: there is nothing to save yet.

    ending: cleans up and returns the line to print. It is called inside the signal handler. Raising an exception
    instead would not do: libraries catch it, or it is lost in a callback.
    """

    def on_signal(number: int, _frame: object) -> None:
        line = ending()
        if first_report() is None and os.environ.get("RANK", "0") == "0":  # one line, not one for each rank
            report(128 + number, [line])
        os._exit(128 + number)

    for number in stop_signals():
        signal.signal(number, on_signal)


def reset_in_forked_children(signals: Sequence[signal.Signals]) -> Callable[[], None]:
    """Restore the default action of `signals` in every child forked from now on, such as a reward's process pool.

    A child would otherwise inherit the rank's handler, survive SIGTERM, and block the process that joins it. Returns a
    function that ends this.
    """
    blocked, ended = threading.local(), threading.Event()

    def before_fork() -> None:
        # A signal that arrives before the child has reset its handlers would be caught by the inherited handler.
        blocked.previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [] if ended.is_set() else signals)

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked.previous_mask)

    def in_child() -> None:
        for number in [] if ended.is_set() else signals:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked.previous_mask)

    os.register_at_fork(before=before_fork, after_in_parent=in_parent, after_in_child=in_child)
    return ended.set
