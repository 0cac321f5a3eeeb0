"""The launcher's flags, parsed into a `Launch`.

Imports only the standard library, so that --help takes less than 0.3 s of CPU time.
"""

import argparse
import os
import subprocess
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from colocated_grpo.errors import ConfigError
from colocated_grpo.launch.cli import add_run_arguments, config_file
from colocated_grpo.runtime.program import LAST_PORT, Launch, OneLineParser

DEFAULT_MASTER_PORT = 29500
DEFAULT_JOIN_TIMEOUT = 900
PROBE_SECONDS = 10


def run_parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's flags. All unknown flags are setting overrides."""
    parser = OneLineParser(
        prog="colocated-grpo",
        allow_abbrev=False,
        description="Train with GRPO, one process per GPU. Each has a vLLM engine, unless engine.placement is server.",
        epilog="Settings override the file: --policy.lr 2e-6 --environments.0.args.max_digits 3 --engine.sleep=false. "
        "Further commands, each with --help: init (write a config), doctor, evaluate, chat, serve, show-rollouts, "
        "compare-runs, report, make-model, sft, atropos (command lines of Atropos' example trainer).",
    )
    integer = partial(parser.add_argument, type=int, metavar="N")
    integer("--gpus", help="GPUs of this node; 0 trains on the CPU (default: all visible)")
    engines = "with engine.placement: server, how many of the GPUs serve engines only (default: 0, the ranks' own)"
    integer("--engine-gpus", default=0, help=engines)
    integer("--nproc", help="processes of a CPU run, with --gpus 0 (default: 1)")
    integer("--nodes", default=1, help="number of nodes (default: 1)")
    integer("--node-rank", default=0, help="index of this node (default: 0)")
    parser.add_argument("--master-addr", metavar="HOST", help="address of node 0; required with several nodes")
    port = f"port on node 0 (default: {DEFAULT_MASTER_PORT}; with one node, any free port)"
    integer("--master-port", metavar="PORT", help=port)
    wait = "longest wait for the other nodes (default: %(default)s)"
    integer("--join-timeout", metavar="SECONDS", default=DEFAULT_JOIN_TIMEOUT, help=wait)
    add_run_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the command, start nothing")
    logs = "write trainer.log, instead of the console, and server.log there (default for server.log: output_dir)"
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help=logs)
    output = "append the run's output to FILE instead of the console"
    parser.add_argument("--redirect-output", type=Path, metavar="FILE", help=output)
    return parser


def read_arguments(
    arguments: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the parser's flags, overrides of settings, and lines about Atropos' flags. Raises ConfigError."""
    if list(arguments[:1]) == ["atropos"]:
        from colocated_grpo.settings.names.atropos_command import read_command

        return read_command(arguments[1:], parser, os.environ, visible_gpus)
    options, overrides = parser.parse_known_args(arguments)
    if overrides and overrides[0].endswith((".yaml", ".yml")) and not overrides[0].startswith("--"):
        raise ConfigError(f"{overrides[0]!r}: unexpected argument; write --config {overrides[0]}")
    # `--gpu 4` would otherwise be reported as an unknown setting.
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    for argument in overrides:
        name = argument.partition("=")[0]
        near = get_close_matches(name.replace("_", "-"), flags, n=1, cutoff=0.85)
        if near and name.startswith("--") and "." not in name:
            raise ConfigError(f"{name}: unknown flag; did you mean {near[0]}?")
    return options, overrides, []


def read_launch(options: argparse.Namespace, overrides: Sequence[str]) -> Launch:
    """Convert the arguments to a `Launch`. Raises ConfigError if they are invalid or contradictory."""
    gpus = visible_gpus(os.environ) if options.gpus is None else options.gpus
    engine_gpus, nodes, port = options.engine_gpus, options.nodes, options.master_port
    if gpus < 0:
        raise ConfigError(f"--gpus={gpus}: must be at least 0")
    if engine_gpus and not 0 < engine_gpus < gpus:
        raise ConfigError(f"--engine-gpus={engine_gpus}: must be less than --gpus={gpus}, of which the rest trains")
    if engine_gpus and nodes > 1:
        raise ConfigError(
            f"--engine-gpus={engine_gpus}: valid on one node; with --nodes {nodes} start servers with "
            "colocated-grpo serve and set engine.urls"
        )
    if options.log_dir is not None and options.redirect_output is not None:
        raise ConfigError("--redirect-output: must be absent with --log-dir, which contains trainer.log")
    if options.nproc is not None and gpus > 0:
        raise ConfigError(f"--nproc={options.nproc}: valid with --gpus 0 only; a GPU run has one process per GPU")
    if options.nproc is not None and options.nproc < 1:
        raise ConfigError(f"--nproc={options.nproc}: must be at least 1")
    if nodes < 1:
        raise ConfigError(f"--nodes={nodes}: must be at least 1")
    if not 0 <= options.node_rank < nodes:
        raise ConfigError(f"--node-rank={options.node_rank}: must be at least 0 and less than --nodes={nodes}")
    if nodes > 1 and options.master_addr is None:
        raise ConfigError(f"--master-addr: required with --nodes={nodes}; it is the address of node 0")
    if port is not None and not 0 < port <= LAST_PORT:
        raise ConfigError(f"--master-port={port}: must be between 1 and {LAST_PORT}")
    if options.join_timeout < 1:
        raise ConfigError(f"--join-timeout={options.join_timeout}: must be at least 1")
    return Launch(
        gpus=gpus,
        engine_gpus=engine_gpus,
        ranks=gpus - engine_gpus if gpus else options.nproc or 1,
        nodes=nodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr or "localhost",
        master_port=port or (DEFAULT_MASTER_PORT if nodes > 1 else None),
        join_timeout=options.join_timeout,
        config=config_file(options),
        resume=options.resume,
        log_level=options.log_level,
        log_dir=options.log_dir,
        overrides=tuple(overrides),
    )


def visible_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs visible to CUDA. Runs nvidia-smi, because importing torch takes seconds."""
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
            break  # CUDA ignores an invalid entry and all entries after it
        count += 1
    return count
