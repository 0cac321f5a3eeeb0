"""The command line `run_colocated_grpo.py`: parse, check everything, print a banner, start torchrun.

Imports only the standard library before the arguments are parsed: --help answers within 0.3 s of CPU time.
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
    LOG_LEVEL_VARIABLE,
    OneLineParser,
    add_run_arguments,
    config_file,
    library_environment,
    prepare_streams,
)
from colocated_grpo.runtime.verdict import FINISHED_SUFFIX, RUN_ERROR, USAGE_ERROR, VERDICT_VARIABLE

if TYPE_CHECKING:
    from colocated_grpo.config.schema import Config

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
DEFAULT_MASTER_PORT = 29500
COMMANDS = {
    "doctor": "colocated_grpo.tools.doctor",
    "serve": "colocated_grpo.serve",
}
"""First argument -> the module that runs instead of a training run."""
PROBE_SECONDS = 10
# Seconds that a stopped torchrun gives its ranks to save before it kills them; its default is 30.
SHUTDOWN_SECONDS = 600
UNFINISHED = (
    "the run exited with code 0 before it was finished, for example by os._exit() in a reward or an environment; "
    "--resume auto continues from its last checkpoint"
)
# The path of a Unix socket has at most 107 characters, of which vLLM needs 37.
MAX_SOCKET_FOLDER = 70


class LaunchError(ValueError):
    """The run cannot be started. The message has one line per problem."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The part of a run that one launcher starts: all ranks of one node."""

    gpus: int
    """GPUs of this node; 0 trains on the CPU."""
    ranks: int
    """Processes on this node."""
    nodes: int
    node_rank: int
    master_addr: str
    master_port: int | None
    """None: a single node, on any free port."""
    config: str
    resume: str | None
    log_level: str
    overrides: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch a run, or another program of COMMANDS, and return its exit code: 2 where it cannot be started.

    `atropos ...` reads the command line of Atropos' example trainer.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        environment = {**os.environ, "PYTHONPATH": python_path(os.environ)}
        os.execve(sys.executable, [sys.executable, "-m", COMMANDS[arguments[0]], *arguments[1:]], environment)
    prepare_streams()
    parser = run_parser()
    try:
        options, overrides, remarks = _read_arguments(arguments, parser)
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
    text = "\n".join([banner(launch, command), *remarks])
    if options.dry_run:
        print(text, *(f"note: {note}" for note in notes), *(f"warning: {line}" for line in problems), sep="\n")
        print("Dry run mode - command not executed")
        return 0
    environment = child_environment(os.environ, launch.gpus, launch.ranks, launch.log_level)
    return _run(command, environment, text, options.redirect_output)


def _read_arguments(
    arguments: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the launcher's flags, overrides of settings, and lines about Atropos' flags."""
    if list(arguments[:1]) != ["atropos"]:
        return *parser.parse_known_args(arguments), []
    from colocated_grpo.config.errors import ConfigError
    from colocated_grpo.launch.atropos_command import read_command

    try:
        return read_command(arguments[1:], run_parser(), os.environ, visible_gpus)
    except ConfigError as error:
        raise LaunchError(str(error)) from None


def run_parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's flags. All unknown flags are setting overrides."""
    parser = OneLineParser(
        prog="run_colocated_grpo.py",
        allow_abbrev=False,
        description="Train with GRPO, one process per GPU, each with its own in-process vLLM engine.",
        epilog="Settings override the file: --policy.lr 2e-6 --environments.0.args.max_digits 3 --engine.sleep=false. "
        "Further commands: run_colocated_grpo.py serve --help, run_colocated_grpo.py atropos --help",
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of this node; 0 trains on the CPU (default: all visible)"
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="processes of a CPU run, with --gpus 0 (default: 1)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="N", help="index of this node (default: 0)")
    parser.add_argument(
        "--master-addr", default="localhost", metavar="HOST", help="address of node 0 (default: localhost)"
    )
    parser.add_argument(
        "--master-port",
        type=int,
        metavar="PORT",
        help=f"port on node 0 (default: {DEFAULT_MASTER_PORT}; with one node, any free port)",
    )
    add_run_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the command, start nothing")
    parser.add_argument(
        "--redirect-output", type=Path, metavar="FILE", help="append the run's output to FILE instead of the console"
    )
    return parser


def read_launch(options: argparse.Namespace, overrides: Sequence[str], parser: argparse.ArgumentParser) -> Launch:
    """Return the launch that the arguments describe. Raises LaunchError where they are invalid or contradictory."""
    _reject_misspelled_flags(overrides, parser)
    gpus = visible_gpus(os.environ) if options.gpus is None else options.gpus
    if gpus < 0:
        raise LaunchError(f"--gpus={gpus}: must be at least 0")
    if options.nproc is not None and gpus > 0:
        raise LaunchError(f"--nproc={options.nproc}: valid with --gpus 0 only; a GPU run has one process per GPU")
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
        raise LaunchError(f"--config: required, as the default {config} does not exist in this folder")
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


def _reject_misspelled_flags(overrides: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise LaunchError for `--gpu 4`, which would otherwise be reported as an unknown setting."""
    if overrides and overrides[0].endswith((".yaml", ".yml")) and not overrides[0].startswith("--"):
        raise LaunchError(f"{overrides[0]!r}: unexpected argument; write --config {overrides[0]}")
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    for argument in overrides:
        name = argument.partition("=")[0]
        if not argument.startswith("--"):
            continue
        near = get_close_matches(name.replace("_", "-"), flags, n=1, cutoff=0.85)
        if near and "." not in name:
            raise LaunchError(f"{name}: unknown flag; did you mean {near[0]}?")


def read_settings(launch: Launch) -> tuple[Config, list[str]]:
    """Return the settings and notes about them. Raises LaunchError where they are invalid for this number of ranks."""
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
    """Return one line for each device, file, function or run to resume that is missing on this machine.

    A dry run prints them as warnings, as it may be meant for another machine.
    """
    from colocated_grpo.config.errors import ConfigError
    from colocated_grpo.config.inputs import check_inputs
    from colocated_grpo.environments.names import check_names
    from colocated_grpo.runtime.run_folder import check_resumed

    problems = []
    if launch.gpus > (visible := visible_gpus(os.environ)):
        problems.append(f"--gpus={launch.gpus}: only {visible} GPUs are visible (nvidia-smi, CUDA_VISIBLE_DEVICES)")
    if importlib.util.find_spec("torch") is None:
        problems.append(f"torchrun: torch is not installed for {sys.executable}; use the Python of `make install`")
    resumed = partial(check_resumed, resume=launch.resume, name=Path(launch.config).stem)
    for check in (check_names, check_inputs, resumed):
        try:
            check(config)
        except ConfigError as error:
            problems += str(error).splitlines()
    return list(dict.fromkeys(problems))  # two checks read the model and may report the same problem


def visible_gpus(environment: Mapping[str, str]) -> int:
    """Return how many GPUs CUDA would list. Runs nvidia-smi, because importing torch takes seconds."""
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
    """Return the command that starts this node's ranks."""
    command = [sys.executable, "-m", "colocated_grpo.launch.elastic", "--nnodes", str(launch.nodes)]
    command += ["--nproc-per-node", str(launch.ranks)]
    if launch.master_port is None:
        # A numeric address: inside a container the host name may not resolve.
        command += ["--standalone", "--local-addr", "127.0.0.1"]
    else:
        command += ["--node-rank", str(launch.node_rank)]
        command += ["--master-addr", launch.master_addr, "--master-port", str(launch.master_port)]
    command += ["-m", "colocated_grpo", "--config", launch.config]
    if launch.resume is not None:
        command += ["--resume", launch.resume]
    return [*command, *launch.overrides]


def child_environment(environment: Mapping[str, str], gpus: int, ranks: int, log_level: str) -> dict[str, str]:
    """Return `environment` with the variables that the ranks need. Library variables set by the user are kept."""
    child = library_environment(log_level) | dict(environment)
    child |= {"PYTHONUNBUFFERED": "1", LOG_LEVEL_VARIABLE: log_level, "PYTHONPATH": python_path(environment)}
    child.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    if gpus == 0:
        child["CUDA_VISIBLE_DEVICES"] = ""
        child.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    return child


def python_path(environment: Mapping[str, str]) -> str:
    """Return PYTHONPATH with this package first, so that a child finds it without an installation."""
    return os.pathsep.join([PACKAGE_ROOT, *filter(None, [environment.get("PYTHONPATH")])])


def banner(launch: Launch, command: Sequence[str]) -> str:
    """Return the summary of the run that is printed before it starts."""
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
        print(f"error: --redirect-output={str(redirect)!r}: cannot write ({error.strerror})", file=sys.stderr)
        return USAGE_ERROR
    with tempfile.TemporaryDirectory(prefix="colocated-grpo-") as folder:
        verdict = Path(folder) / "verdict"
        # torchrun's log folder and the sockets of tensor-parallel engines would otherwise stay behind in /tmp.
        inside = {"PET_LOG_DIR": folder, **environment, VERDICT_VARIABLE: str(verdict)}
        if len(folder) <= MAX_SOCKET_FOLDER:
            inside.setdefault("VLLM_RPC_BASE_PATH", folder)
        code = run_command(command, inside, redirect)
        if code == 0 and verdict.parent.is_dir() and not verdict.with_suffix(FINISHED_SUFFIX).exists():
            known, lines = str(RUN_ERROR), f"error: {UNFINISHED}"
        elif code and verdict.exists():
            known, _, lines = verdict.read_text(encoding="utf-8").partition("\n")
        else:
            return code
    with suppress(OSError):
        _show(lines, redirect, sys.stderr)
    return int(known)


def _show(text: str, redirect: Path | None, console: TextIO) -> None:
    """Print `text`. Raises OSError where the file cannot be written; a closed console is not an error."""
    if redirect is None:
        with suppress(OSError):
            print(text, file=console, flush=True)
    else:
        with redirect.open("a", encoding="utf-8", errors="backslashreplace") as file:
            print(text, file=file)


if __name__ == "__main__":
    sys.exit(main())
