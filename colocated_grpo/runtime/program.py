"""Startup code of this package's programs: streams, arguments, environment variables, logging, and rank variables.

Standard library only, because variables that torch and vLLM read on import must be set first.
"""

import argparse
import faulthandler
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
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from errno import EISDIR
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

from colocated_grpo.errors import ConfigError
from colocated_grpo.runtime.verdict import RUN_ERROR, USAGE_ERROR, first_report, report

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOG_LEVEL_VARIABLE = "COLOCATED_GRPO_LOG_LEVEL"
OPENMP_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
"""Variables that libgomp reads when it is loaded. With these values, idle OpenMP threads spin for microseconds, then
sleep. By default, they spin long enough to take cores from other programs. Without, each short wait costs a sleep."""
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
LAST_PORT = 65535
LOOPBACK = "127.0.0.1"
STORE_VARIABLE = "COLOCATED_GRPO_STORE"
"""Descriptor of the socket on which rank 0 serves the ranks' store."""
JOIN_VARIABLE = "COLOCATED_GRPO_JOIN_SECONDS"
"""Maximum wait of a rank for the others."""
URLS_VARIABLE = "COLOCATED_GRPO_ENGINE_URLS"
"""Addresses of the engine servers, separated by spaces, for ranks whose config has no addresses."""
KEY_VARIABLE = "COLOCATED_GRPO_ENGINE_API_KEY"
"""API key of the engine servers. Each launch has a new key, because other users of the machine can reach the ports."""
DESCRIPTORS = 65_536
"""Requested soft limit: more than all connections and files of one run."""
LAUNCHER_FLAGS = {"--dry-run", "--engine-gpus", "--gpus", "--log-dir", "--nodes", "--nproc", "--redirect-output"}
"""Flags that users may add by mistake to the command of a rank or of a tool, which use the GPUs that they see."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, without the usage text, and knows no abbreviations."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Exit on a misspelt flag, which would otherwise be read as a setting."""
        self.allow_abbrev = False
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        for argument in sys.argv[1:] if args is None else args:
            name = argument.partition("=")[0]
            if not name.startswith("--") or "." in name or name in flags:
                continue
            if name in LAUNCHER_FLAGS:
                self.error(f"{name}: a flag of the launcher, colocated-grpo; {self.prog} uses the GPU that it sees")
            if near := get_close_matches(name.replace("_", "-"), flags, n=1, cutoff=0.85):
                self.error(f"{name}: unknown flag; did you mean {near[0]}?")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace("invalid int value:", "not a whole number:")
        self.exit(USAGE_ERROR, f"error: {message}\n")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The part of a run started by one launcher: all ranks of one node."""

    gpus: int
    """GPUs of this node; 0 trains on the CPU."""
    engine_gpus: int
    """Number of this node's GPUs used by engine servers. The servers use the last GPUs."""
    ranks: int
    """Processes that train on this node."""
    nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    """0: any free port; a single node only."""
    join_timeout: int
    """Seconds to wait for the other nodes."""
    config: str
    resume: str | None
    log_level: str
    log_dir: Path | None
    """Folder for server.log and trainer.log."""
    overrides: tuple[str, ...]


def prepare_streams() -> None:
    """Make printing safe if a standard stream is closed, or its encoding lacks a character."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # Occupy the closed descriptor, else the next opened file would get its number and receive printed text.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def set_up_logging(log_level: str, *, prefix: str = "") -> None:
    """Log at this level. prefix: prefix of every line."""
    logging.basicConfig(format=f"{prefix}%(levelname)s %(name)s: %(message)s")
    if log_level == "DEBUG":
        logging.getLogger().setLevel(logging.DEBUG)
    else:  # users cannot act on warnings that libraries log on import
        for library in ("vllm", "bitsandbytes"):  # PEFT imports bitsandbytes
            logging.getLogger(library).setLevel(logging.ERROR)
        warnings.simplefilter("ignore", FutureWarning)
    # huggingface_hub has its own log handler, so every download retry would be shown twice.
    logging.getLogger("huggingface_hub").propagate = False
    logging.getLogger("colocated_grpo").setLevel(log_level)


def prepare_libraries(log_level: str, *, prefix: str = "") -> None:
    """Set variables that libraries read on import, and log at this level. prefix: prefix of every line."""
    for name, value in library_environment(log_level).items():
        os.environ.setdefault(name, value)
    set_up_logging(log_level, prefix=prefix)


def library_environment(log_level: str) -> dict[str, str]:
    """Return default values of variables that libraries read on import. Callers keep values set by the user."""
    debug = log_level == "DEBUG"
    return {
        "NCCL_DEBUG": "INFO" if debug else "WARN",
        "TORCH_DISTRIBUTED_DEBUG": "INFO" if debug else "OFF",
        "TOKENIZERS_PARALLELISM": "false",
        **OPENMP_SETTINGS,
        "FLASHINFER_LOGGING_LEVEL": "INFO" if debug else "ERROR",
        "TORCH_CPP_LOG_LEVEL": "INFO" if debug else "ERROR",
        # Else each start traces the gradients of blocks with adapters or shared prefixes again.
        "TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD": "1",
        # vLLM (0.32) would turn autotuning messages on: one line for each configuration that Triton tries for a kernel.
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
def frozen_imports() -> Generator[None]:
    """Import without garbage collection, and exclude all existing objects from later collections.

    Modules are never freed, but every later collection would scan all their objects again.
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
    """Return the lines with the prefix "error: ". Indented lines belong to the line above and get no prefix."""
    return [line if line.startswith("  ") else f"error: {line}" for line in lines]


def exit_code(error: Exception, *above: str, shown: bool = True) -> int:
    """Return the exit code of a program that an error ends: 2 for settings and arguments, 1 for all others.

    The error is printed below the lines `above`. shown: False on all ranks but one if every rank has the same error.
    """
    if shown:
        print(*above, *error_text(str(error).splitlines()), sep="\n", file=sys.stderr, flush=True)
    return USAGE_ERROR if isinstance(error, ConfigError) else RUN_ERROR


def check_writable(flag: str, path: Path) -> None:
    """Make the folder of an output that takes long to compute. Raises ConfigError if the output cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            if path.is_dir():
                raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
    except OSError as error:
        raise ConfigError(f"{flag}={str(path)!r}: cannot write ({error.strerror})") from None


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to `DESCRIPTORS`, or to the hard limit if that is lower.

    Most systems default to 1,024 files. Episodes and rewards that call services can use up this limit. No checkpoint
    can be written then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables if RANK is not set. They come from srun's variables, or describe a single rank."""
    if "RANK" in environment:
        return {}
    # Only srun sets SLURM_STEP_NUM_TASKS. Without srun a batch script is one process, regardless of SLURM_NTASKS.
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        return _slurm_environment(environment)
    return rank_variables(0, 1)


def rank_variables(
    local_rank: int, local_size: int, *, node: int = 0, nodes: int = 1, host: str = LOOPBACK, port: int = 0
) -> dict[str, str]:
    """Return torchrun's variables of a rank. host, port: of the ranks' store; 0: any, for a single rank."""
    return {
        "RANK": str(node * local_size + local_rank),
        "WORLD_SIZE": str(nodes * local_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # even if the launcher itself runs under torchrun
    }


def environment_problem(environment: Mapping[str, str]) -> str | None:
    """Return one line if torchrun's variables, possibly set by another tool, are missing or invalid; else None."""
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
        "LOCAL_WORLD_SIZE": re.split(r"\D", step_or_job("TASKS_PER_NODE", tasks))[0],  # "4(x2)": two equal nodes
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(step_or_job("NODELIST", "127.0.0.1")),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20000 + int(job) % 20000),
    }


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: 'gpu[03-07,12],login' -> 'gpu03'."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist)
    return "".join(part or "" for part in found.groups()) if found else nodelist


def show_crashes() -> None:
    """Print Python's stacks if a library crashes. Call again after vLLM's tvm_ffi (0.1) has replaced the handler."""
    faulthandler.disable()
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # else faulthandler would also call tvm_ffi's
    faulthandler.enable(2)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup."""
    hangup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT] + ([] if hangup_ignored else [signal.SIGHUP])


def exit_on_stop_signals(ending: Callable[[], str]) -> None:
    """End this process at once on a stop signal, with exit code 128 + its number: there is nothing to save yet.

    ending: cleans up and returns the line to print. The signal handler calls `ending` directly. If the handler raised
    an exception instead, libraries could catch it, or a callback could lose it.
    """

    def on_signal(number: int, _frame: object) -> None:
        line = ending()
        if first_report() is None and os.environ.get("RANK", "0") == "0":  # one line instead of one per rank
            report(128 + number, [line])
        os._exit(128 + number)

    for number in stop_signals():
        signal.signal(number, on_signal)


def reset_in_forked_children(signals: Sequence[signal.Signals]) -> Callable[[], None]:
    """Restore the default action of `signals` in every child forked from now on, such as a reward's process pool.

    Otherwise a child would inherit the rank's handler, survive SIGTERM, and block the process that joins it. Returns a
    function that stops resetting the handlers.
    """
    blocked, ended = threading.local(), threading.Event()

    def before_fork() -> None:
        # The inherited handler would catch a signal that arrives before the child has reset its handlers.
        blocked.previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [] if ended.is_set() else signals)

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked.previous_mask)

    def in_child() -> None:
        for number in [] if ended.is_set() else signals:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked.previous_mask)

    os.register_at_fork(before=before_fork, after_in_parent=in_parent, after_in_child=in_child)
    return ended.set
