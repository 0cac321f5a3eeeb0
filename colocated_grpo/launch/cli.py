"""What every rank runs: `python -m colocated_grpo --config FILE`, under torchrun, under srun, or alone.

Only the standard library is imported here: variables that torch and vLLM read at import time are set first.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import gc
import io
import logging
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from colocated_grpo.runtime.descriptors import raise_descriptor_limit

if TYPE_CHECKING:
    from colocated_grpo.config.schema import Config

DEFAULT_CONFIG = "training_configs/dr_grpo_config.yaml"
AUTO = "auto"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOG_LEVEL_VARIABLE = "COLOCATED_GRPO_LOG_LEVEL"
VERDICT_VARIABLE = "COLOCATED_GRPO_VERDICT"
"""File into which a rank that knows what went wrong writes its exit code and its lines."""
FINISHED_SUFFIX = ".end"
"""Of the file beside it that a rank makes when its run is over: an exit code of 0 may be that of user code."""
RUN_ERROR, USAGE_ERROR = 1, 2
"""Exit codes: the run could not go on; what was asked for cannot run."""
DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
"""The last three: a file system that became read-only, a disk that broke, a network share that went away."""
OPENMP_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
"""For OpenMP, when it is loaded: threads that wait spin for microseconds and then sleep. By default they spin for so
long that beside other work, or with as many ranks as cores, they keep everybody from the cores. Not to spin at all
would put a thread to sleep at each short wait."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line each."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"error: {message.removeprefix('argument ')}\n")


def prepare_streams() -> None:
    """Let nothing that is printed end the run: streams that are closed, and text that a terminal has no letters for."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one: the next file would get it, and with it what is printed.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What the launcher and a rank both understand. Everything that they do not is an override."""
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file (default: that of the resumed run, else {DEFAULT_CONFIG})"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=AUTO,
        metavar="RUN",
        help="continue from the last checkpoint of this run folder; auto or nothing: of the newest run",
    )
    parser.add_argument(
        "--log-level",
        type=_log_level,
        metavar="{" + ",".join(LOG_LEVELS) + "}",
        default=os.environ.get(LOG_LEVEL_VARIABLE, "INFO"),
        help="DEBUG also lets NCCL and torch.distributed talk (default: %(default)s)",
    )


def _log_level(name: str) -> str:
    """A `type` and no `choices`, which are not asked about the default."""
    if name not in LOG_LEVELS:
        raise argparse.ArgumentTypeError(f"{name!r}: must be one of {', '.join(LOG_LEVELS)} ({LOG_LEVEL_VARIABLE} too)")
    return name


def config_file(options: argparse.Namespace) -> str:
    """The file that was asked for; a run folder that is resumed keeps its own."""
    saved = Path(options.resume or "") / "config.yaml"
    resumed = options.resume not in (None, AUTO) and saved.is_file()
    return options.config or (str(saved) if resumed else DEFAULT_CONFIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank to the end. Returns its exit code; an exception that no user can act on passes through."""
    prepare_streams()
    parser = OneLineParser(prog="python -m colocated_grpo", description=__doc__, allow_abbrev=False)
    add_run_arguments(parser)
    options, overrides = parser.parse_known_args(arguments)
    os.environ.update(rank_environment(os.environ))
    if problem := environment_problem(os.environ):
        parser.error(problem)
    for name, value in library_environment(options.log_level).items():
        os.environ.setdefault(name, value)
    raise_descriptor_limit()
    faulthandler.enable()
    rank = os.environ["RANK"]
    logging.basicConfig(format=f"[rank {rank}] %(levelname)s %(name)s: %(message)s")
    if options.log_level == "DEBUG":
        logging.getLogger().setLevel(logging.DEBUG)
    else:  # what libraries tell each other at import time is nothing that a user can act on
        logging.getLogger("vllm").setLevel(logging.ERROR)
        warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("colocated_grpo").setLevel(options.log_level)
    return _train(options, overrides)


def _train(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from colocated_grpo.config.errors import ConfigError
    from colocated_grpo.config.inputs import check_inputs
    from colocated_grpo.config.loading import read_config
    from colocated_grpo.config.rules import check_world
    from colocated_grpo.runtime.run_folder import check_resumed

    name = Path(config_file(options)).stem
    try:
        loaded = read_config(config_file(options), overrides)
        check_world(loaded.config, int(os.environ["WORLD_SIZE"]))
        config, notes = check_inputs(loaded.config)
        check_resumed(config, options.resume, name)
    except ConfigError as error:
        _say(*_error_lines(error), to=sys.stderr)
        return USAGE_ERROR
    _say(*(f"note: {note}" for note in loaded.notes + notes), to=sys.stdout)

    from torch.distributed.elastic.multiprocessing.errors import record

    # torchrun shows what `record` keeps of the first rank that failed, and shows it last
    return record(_run)(config, options.resume, name)


def _import_trainer() -> Callable[..., None]:
    # Modules stay: a collection finds nothing among them and takes its time, and building an engine asks for several.
    gc.disable()
    try:
        from colocated_grpo.trainer import main
    finally:
        gc.freeze()
        gc.enable()
    return main


def _run(config: Config, resume: str | None, name: str) -> int:
    """Train. What the user can act on becomes one line, from the first rank that met it, and an exit code."""
    from colocated_grpo.config.errors import ConfigError
    from colocated_grpo.errors import AlreadyReported, RunError

    train = _import_trainer()
    try:
        train(config, resume=resume, name=name)
    except (ConfigError, RunError) as error:
        code = USAGE_ERROR if isinstance(error, ConfigError) else RUN_ERROR
        _report(code, _error_lines(error))
        return code
    except OSError as error:
        if not (line := fault_of_the_machine(error, [config.output_dir, resume])):
            raise
        _report(RUN_ERROR, [f"error: {line}"])
        return RUN_ERROR
    except SystemExit as error:  # of user code: with a code of 0 the run would pass for finished
        raise RuntimeError(f"sys.exit({error.code!r}) was called during the run") from error
    except AlreadyReported:
        logging.getLogger(__name__).debug("another rank failed first; what this one met:", exc_info=True)
        return RUN_ERROR
    if VERDICT_VARIABLE in os.environ:
        with suppress(OSError):
            Path(os.environ[VERDICT_VARIABLE]).with_suffix(FINISHED_SUFFIX).touch()
    return 0


def fault_of_the_machine(error: OSError, folders: Sequence[str | None]) -> str | None:
    """In one line, what no traceback explains better; None for any other error. folders: that the run writes into."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error.strerror}: raise the limit (ulimit -n)"
    if error.errno in DISK_FAULTS:
        return f"{error.strerror}: {error.filename or 'while writing into the run folder'}"
    if isinstance(error.filename, str):
        file = Path(error.filename).absolute()
        if any(file.is_relative_to(Path(folder).absolute()) for folder in folders if folder not in (None, AUTO)):
            return f"{error.strerror}: {error.filename}"
    return None


def _report(code: int, lines: Sequence[str]) -> None:
    """Show the lines; where a launcher waits, let it show them when torchrun has ended, and return the code."""
    if VERDICT_VARIABLE in os.environ:
        text = "\n".join([str(code), *lines])
        with suppress(OSError):  # what tidies up temporary folders may have taken this one from a long run
            Path(os.environ[VERDICT_VARIABLE]).write_text(text, encoding="utf-8", errors="backslashreplace")
            return
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _error_lines(error: Exception) -> list[str]:
    return [f"error: {line}" for line in str(error).splitlines()]


def _say(*lines: str, to: TextIO) -> None:
    """Print on rank 0 only: the ranks read the same settings and fail alike."""
    if os.environ["RANK"] == "0":
        for line in lines:
            print(line, file=to, flush=True)


def library_environment(log_level: str) -> dict[str, str]:
    """Variables that libraries read when they are imported. A value that the user has set goes before these."""
    debug = log_level == "DEBUG"
    return {
        "NCCL_DEBUG": "INFO" if debug else "WARN",
        "TORCH_DISTRIBUTED_DEBUG": "INFO" if debug else "OFF",
        "TOKENIZERS_PARALLELISM": "false",
        **OPENMP_SETTINGS,
        "TORCH_CPP_LOG_LEVEL": "INFO" if debug else "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "DEBUG" if debug else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables, where torchrun has not set them: from SLURM's, or those of a single rank."""
    if "RANK" in environment:
        return {}
    if "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment:
        return _slurm_environment(environment)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def environment_problem(environment: Mapping[str, str]) -> str | None:
    """What is wrong with torchrun's variables, in one line: others may have set some of them, or left them behind."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            return f"RANK={environment['RANK']!r} is set and {name} is not: unset RANK, or start with torchrun"
        if name != "MASTER_ADDR" and not environment[name].isdecimal():
            return f"{name}={environment[name]!r}: must be a whole number"
    if int(environment["RANK"]) >= int(environment["WORLD_SIZE"]):
        return f"RANK={environment['RANK']}: must be less than WORLD_SIZE={environment['WORLD_SIZE']}"
    return None


def _slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    def step_or_job(name: str, default: str) -> str:
        # a job step may use fewer tasks and nodes than its job
        return environment.get(f"SLURM_STEP_{name}") or environment.get(f"SLURM_{name}") or default

    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"]
    job = re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or "0"
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": re.match(r"\d+", step_or_job("TASKS_PER_NODE", tasks))[0],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(step_or_job("NODELIST", "127.0.0.1")),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20000 + int(job) % 20000),
    }


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: 'gpu[03-07,12],login' -> 'gpu03'."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist)
    return "".join(part or "" for part in found.groups()) if found else nodelist
