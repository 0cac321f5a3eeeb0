"""From a command line to torchrun: parse, check, show, run. Starts nothing before everything has been checked.

Imports only the standard library until the arguments are read, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from colocated_grpo.launch.cli import (
    FINISHED_SUFFIX,
    LOG_LEVEL_VARIABLE,
    RUN_ERROR,
    USAGE_ERROR,
    VERDICT_VARIABLE,
    OneLineParser,
    add_run_arguments,
    config_file,
    library_environment,
    prepare_streams,
)

if TYPE_CHECKING:
    from colocated_grpo.config.schema import Config

DEFAULT_MASTER_PORT = 29500
PROBE_SECONDS = 10
# torchrun kills ranks that are still saving this long after it was asked to stop.
SHUTDOWN_SECONDS = 600
ENDED_FROM_INSIDE = (
    "the run ended with exit code 0 before its end, as os._exit() in a reward or an environment does it; --resume auto "
    "continues from its last checkpoint"
)
# A socket's name has 107 characters at most, of which vLLM takes 37.
LONGEST_SOCKET_FOLDER = 70


class LaunchError(ValueError):
    """Arguments that cannot be run; one line."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launcher's part of a run."""

    gpus: int
    """GPUs of this node; 0 trains on the CPU."""
    ranks: int
    """Processes on this node."""
    nodes: int
    node_rank: int
    master_addr: str
    master_port: int | None
    """None: one node, any free port."""
    config: str
    resume: str | None
    log_level: str
    overrides: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch a run. Returns its exit code, 2 when it cannot be started."""
    prepare_streams()
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    try:
        launch = read_launch(options, overrides, parser)
        config, notes = read_settings(launch)
        problems = machine_problems(launch, config)
        if problems and not options.dry_run:
            raise LaunchError("\n".join(problems))
    except LaunchError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return USAGE_ERROR
    command = torchrun_command(launch)
    text = banner(launch, command)
    if options.dry_run:
        print(text, *(f"note: {note}" for note in notes), *(f"warning: {line}" for line in problems), sep="\n")
        print("Dry run mode - command not executed")
        return 0
    environment = child_environment(os.environ, launch.gpus, launch.ranks, launch.log_level)
    return _run(command, environment, text, options.redirect_output)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="run_colocated_grpo.py",
        allow_abbrev=False,
        description="Train with GRPO, one process per GPU, each with its own in-process vLLM engine.",
        epilog="Any setting may follow: --policy.lr 2e-6 --environments.0.args.max_digits 3 --engine.sleep=false",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of this node; 0: CPU (default: all visible ones)")
    parser.add_argument("--nproc", type=int, metavar="N", help="processes of a CPU run (default: 1)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the run (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="N", help="this node's number (default: 0)")
    parser.add_argument("--master-addr", default="localhost", metavar="HOST", help="node 0 (default: localhost)")
    parser.add_argument(
        "--master-port",
        type=int,
        metavar="PORT",
        help=f"port on node 0 (default: {DEFAULT_MASTER_PORT}, any free one on a single node)",
    )
    add_run_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="show what would run, and run nothing")
    parser.add_argument(
        "--redirect-output", type=Path, metavar="FILE", help="append the run's output to FILE, none to the console"
    )
    return parser


def read_launch(options: argparse.Namespace, overrides: Sequence[str], parser: argparse.ArgumentParser) -> Launch:
    """Raises LaunchError for arguments that contradict each other or themselves."""
    _refuse_misspelt_flags(overrides, parser)
    gpus = visible_gpus(os.environ) if options.gpus is None else options.gpus
    if gpus < 0:
        raise LaunchError(f"--gpus={gpus}: must be at least 0")
    if options.nproc is not None and gpus > 0:
        raise LaunchError(f"--nproc={options.nproc}: only for CPU runs (--gpus 0); a GPU run has one process per GPU")
    if options.nproc is not None and options.nproc < 1:
        raise LaunchError(f"--nproc={options.nproc}: must be at least 1")
    if options.nodes < 1:
        raise LaunchError(f"--nodes={options.nodes}: must be at least 1")
    if not 0 <= options.node_rank < options.nodes:
        raise LaunchError(f"--node-rank={options.node_rank}: must be at least 0 and less than --nodes={options.nodes}")
    if options.master_port is not None and not 0 < options.master_port < 65536:
        raise LaunchError(f"--master-port={options.master_port}: must be between 1 and 65535")
    config = config_file(options)
    if options.config is None and not Path(config).is_file():
        raise LaunchError(f"--config FILE is needed: there is no {config} here")
    port = options.master_port or (DEFAULT_MASTER_PORT if options.nodes > 1 else None)
    return Launch(
        gpus=gpus,
        ranks=gpus or options.nproc or 1,
        nodes=options.nodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=port,
        config=config,
        resume=options.resume,
        log_level=options.log_level,
        overrides=tuple(overrides),
    )


def _refuse_misspelt_flags(overrides: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Settings have a dot or are words of their own; `--gpu 4` is neither, and as a setting its error would mislead."""
    if overrides and overrides[0].endswith((".yaml", ".yml")) and not overrides[0].startswith("--"):
        raise LaunchError(f"{overrides[0]!r}: a file of settings follows --config")
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    for argument in overrides:
        name = argument.partition("=")[0]
        if not argument.startswith("--"):
            continue
        near = get_close_matches(name.replace("_", "-"), flags, n=1, cutoff=0.85)
        if near and "." not in name:
            raise LaunchError(f"{name}: unknown flag; did you mean {near[0]}?")


def read_settings(launch: Launch) -> tuple[Config, list[str]]:
    """The settings and notes about them. Raises LaunchError when they cannot be run on this many ranks."""
    from colocated_grpo.config.errors import ConfigError
    from colocated_grpo.config.loading import read_config
    from colocated_grpo.config.rules import check_world

    try:
        loaded = read_config(launch.config, launch.overrides)
        check_world(loaded.config, launch.ranks * launch.nodes)
    except ConfigError as error:
        raise LaunchError(str(error)) from None
    return loaded.config, loaded.notes


def machine_problems(launch: Launch, config: Config) -> list[str]:
    """What the run needs and does not find here: devices, files, code, a run to resume, each in one line.

    A dry run shows it and goes on: it may plan for another machine.
    """
    from colocated_grpo.config.errors import ConfigError
    from colocated_grpo.config.inputs import check_inputs
    from colocated_grpo.environments.names import check_names
    from colocated_grpo.runtime.run_folder import check_resumed

    problems = []
    if launch.gpus > (visible := visible_gpus(os.environ)):
        problems.append(f"--gpus={launch.gpus}: only {visible} visible here (nvidia-smi, CUDA_VISIBLE_DEVICES)")
    if importlib.util.find_spec("torch") is None:
        problems.append(f"torchrun not found: {sys.executable} has no torch; use the Python that `make install` fills")
    resumed = partial(check_resumed, resume=launch.resume, name=Path(launch.config).stem)
    for check in (check_names, check_inputs, resumed):
        try:
            check(config)
        except ConfigError as error:
            problems += str(error).splitlines()
    return list(dict.fromkeys(problems))  # two of them read the model, and may say the same of it


def visible_gpus(environment: Mapping[str, str]) -> int:
    """GPUs that a process started here would see. Asks nvidia-smi, as importing torch takes seconds."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=PROBE_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    installed = sum(line.startswith("GPU ") for line in listing.splitlines())
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or installed == 0:
        return installed
    count = 0
    for device in filter(None, map(str.strip, chosen.split(","))):
        if device.lstrip("-").isdigit() and not 0 <= int(device) < installed:
            break  # CUDA ignores an invalid number and everything after it
        count += 1
    return count


def torchrun_command(launch: Launch) -> list[str]:
    """The exact command of this node."""
    command = [sys.executable, "-m", "colocated_grpo.launch.elastic", "--nnodes", str(launch.nodes)]
    command += ["--nproc-per-node", str(launch.ranks)]
    if launch.master_port is None:
        # by number, as the host's own name may resolve to nothing inside a container
        command += ["--standalone", "--local-addr", "127.0.0.1"]
    else:
        command += ["--node-rank", str(launch.node_rank)]
        command += ["--master-addr", launch.master_addr, "--master-port", str(launch.master_port)]
    command += ["-m", "colocated_grpo", "--config", launch.config]
    if launch.resume is not None:
        command += ["--resume", launch.resume]
    return [*command, *launch.overrides]


def child_environment(environment: Mapping[str, str], gpus: int, ranks: int, log_level: str) -> dict[str, str]:
    """`environment` with what a node's ranks need; of the libraries' variables, those the user has set stay."""
    package_root = str(Path(__file__).resolve().parents[2])
    paths = [package_root, *filter(None, [environment.get("PYTHONPATH")])]
    child = library_environment(log_level) | dict(environment)
    child |= {"PYTHONUNBUFFERED": "1", LOG_LEVEL_VARIABLE: log_level, "PYTHONPATH": os.pathsep.join(paths)}
    child.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    if gpus == 0:
        child["CUDA_VISIBLE_DEVICES"] = ""
        child.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    return child


def banner(launch: Launch, command: Sequence[str]) -> str:
    """What is about to run, for people."""
    free_port = launch.master_port is None
    master = "this machine, any free port" if free_port else f"{launch.master_addr}:{launch.master_port}"
    facts = {
        "GPUs per node": str(launch.gpus) if launch.gpus else f"0 (CPU, {launch.ranks} ranks)",
        "Nodes": launch.nodes,
        "Total ranks": launch.ranks * launch.nodes,
        "Node rank": launch.node_rank,
        "Master": master,
        "Config": launch.config,
        "Overrides": shlex.join(launch.overrides) or "none",
        "Resume": launch.resume or "no",
        "Log level": launch.log_level,
        "Command": shlex.join(command),
    }
    rows = [f"  {name:<14} {value}" for name, value in facts.items()]
    return "\n".join(["Co-located GRPO", *rows])


def _run(command: Sequence[str], environment: Mapping[str, str], text: str, redirect: Path | None) -> int:
    from colocated_grpo.launch.processes import run_command

    try:
        _show(text, redirect, sys.stdout)
    except OSError as error:
        print(f"error: --redirect-output={str(redirect)!r}: cannot be written ({error.strerror})", file=sys.stderr)
        return USAGE_ERROR
    with tempfile.TemporaryDirectory(prefix="colocated-grpo-") as folder:
        verdict = Path(folder) / "verdict"
        # torchrun would make a folder for its logs in each run and leave it behind; tensor-parallel engines, sockets.
        inside = {"PET_LOG_DIR": folder, **environment, VERDICT_VARIABLE: str(verdict)}
        if len(folder) <= LONGEST_SOCKET_FOLDER:
            inside.setdefault("VLLM_RPC_BASE_PATH", folder)
        code = run_command(command, inside, redirect)
        if code == 0 and verdict.parent.is_dir() and not verdict.with_suffix(FINISHED_SUFFIX).exists():
            known, lines = str(RUN_ERROR), f"error: {ENDED_FROM_INSIDE}"
        elif code and verdict.exists():
            known, _, lines = verdict.read_text(encoding="utf-8").partition("\n")
        else:
            return code
    with suppress(OSError):
        _show(lines, redirect, sys.stderr)
    return int(known)


def _show(text: str, redirect: Path | None, console: TextIO) -> None:
    """Raises OSError where a file cannot be written. A run needs nobody who looks at its console."""
    if redirect is None:
        with suppress(OSError):
            print(text, file=console, flush=True)
    else:
        with redirect.open("a", encoding="utf-8", errors="backslashreplace") as file:
            print(text, file=file)


if __name__ == "__main__":
    sys.exit(main())
