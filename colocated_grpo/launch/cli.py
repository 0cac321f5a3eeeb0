"""Entry point of a rank: `python -m colocated_grpo [--config FILE]`, under torchrun, under srun, or alone. Also
the launcher's flags, parsed into a `Launch`.

Only the standard library and psutil are imported at the top, because environment variables that torch and vLLM read on
import must be set first, and so that --help takes less than 0.3 s of CPU time.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from colocated_grpo.errors import AlreadyReported, ConfigError
from colocated_grpo.runtime import parents_death, processes, program, verdict

if TYPE_CHECKING:
    from colocated_grpo.runtime.joining import Joined
    from colocated_grpo.settings.config_file import LoadedConfig
    from colocated_grpo.settings.schema import Config
    from colocated_grpo.tracking.ending import RunOutput

DEFAULT_MASTER_PORT = 29500
DEFAULT_JOIN_TIMEOUT = 900


def run_parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's flags. All unknown flags are setting overrides."""
    parser = program.OneLineParser(
        prog="colocated-grpo",
        description="Train with GRPO, one process per GPU. Each has a vLLM engine, unless engine.placement is server.",
        epilog="Settings override the file: --policy.lr 2e-6 --environments.0.args.max_digits 3 --engine.sleep=false. "
        "Further commands, each with --help: init (write a config), doctor, evaluate, chat, serve, show-rollouts, "
        "compare-runs, report, make-model, sft, atropos (command lines of Atropos' example trainer).",
    )
    package = sys.modules["colocated_grpo"]  # an import would be a circle
    parser.add_argument("--version", action="version", version=package.__version__)
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
    check_first(overrides)
    return options, overrides, []


def check_first(overrides: Sequence[str]) -> None:
    """Raise ConfigError if the first argument is a config file or a command in place of a setting."""
    first = overrides[0] if overrides else ""
    if first.endswith((".yaml", ".yml")) and not first.startswith("--"):
        raise ConfigError(f"{first!r}: unexpected argument; write --config {first}")
    if not first.startswith("-") and first.replace("-", "").isalpha():
        rule = "not a command here (colocated-grpo --help lists them); to train, give only flags and settings"
        raise ConfigError(f"{first!r}: {rule}")


def read_launch(options: argparse.Namespace, overrides: Sequence[str]) -> program.Launch:
    """Convert the arguments to a `Launch`. Raises ConfigError if they are invalid or contradictory."""
    gpus = visible_gpus(os.environ) if options.gpus is None else options.gpus
    engine_gpus, nodes, port = options.engine_gpus, options.nodes, options.master_port
    if gpus < 0:
        raise ConfigError(f"--gpus={gpus}: must be at least 0")
    if engine_gpus and not 0 < engine_gpus < gpus:
        raise ConfigError(f"--engine-gpus={engine_gpus}: must be less than --gpus={gpus}, of which the rest trains")
    if engine_gpus and nodes > 1:
        rule = f"valid on one node; with --nodes {nodes} start servers with colocated-grpo serve and set engine.urls"
        raise ConfigError(f"--engine-gpus={engine_gpus}: {rule}")
    if options.log_dir is not None and options.redirect_output is not None:
        raise ConfigError("--redirect-output: must be absent with --log-dir, which contains trainer.log")
    if options.nproc is not None and gpus > 0:
        raise ConfigError(f"--nproc={options.nproc}: valid with --gpus 0 only; a GPU run has one process per GPU")
    for flag, number in (("nproc", options.nproc), ("nodes", nodes), ("join-timeout", options.join_timeout)):
        if number is not None and number < 1:
            raise ConfigError(f"--{flag}={number}: must be at least 1")
    if not 0 <= options.node_rank < nodes:
        raise ConfigError(f"--node-rank={options.node_rank}: must be at least 0 and less than --nodes={nodes}")
    if nodes > 1 and options.master_addr is None:
        raise ConfigError(f"--master-addr: required with --nodes={nodes}; it is the address of node 0")
    if port is not None and not 0 < port <= program.LAST_PORT:
        raise ConfigError(f"--master-port={port}: must be between 1 and {program.LAST_PORT}")
    unchanged = ("engine_gpus", "nodes", "node_rank", "join_timeout", "resume", "log_level", "log_dir")
    return program.Launch(
        **{name: getattr(options, name) for name in unchanged},
        gpus=gpus,
        ranks=gpus - engine_gpus if gpus else options.nproc or 1,
        master_addr=options.master_addr or "localhost",
        master_port=port or (DEFAULT_MASTER_PORT if nodes > 1 else 0),
        config=config_file(options),
        overrides=tuple(overrides),
    )


def visible_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs visible to CUDA."""
    return len(processes.visible(processes.list_gpus().gpus, environment))


AUTO = "auto"
DEFAULT_CONFIG = "training_configs/dr_grpo_config.yaml"
"""Config of a run without --config. The file is also packaged, so it is found from any working folder."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags common to launcher and rank. All unknown flags are setting overrides."""
    file = f"YAML file (default: {DEFAULT_CONFIG}; with --resume RUN: the run's own)"
    run = "continue from the last checkpoint of the run folder RUN; auto, or no RUN: of this config's newest run"
    level = "DEBUG also turns on the logs of NCCL and torch.distributed (default: %(default)s)"
    levels, default = "{" + ",".join(program.LOG_LEVELS) + "}", os.environ.get(program.LOG_LEVEL_VARIABLE, "INFO")
    parser.add_argument("-c", "--config", metavar="FILE", help=file)
    parser.add_argument("--resume", nargs="?", const=AUTO, metavar="RUN", help=run)
    parser.add_argument("--log-level", type=_log_level, metavar=levels, default=default, help=level)


def _log_level(name: str) -> str:
    """Check a log level. argparse's `choices` would not check a default taken from the environment."""
    if name not in program.LOG_LEVELS:
        known = ", ".join(program.LOG_LEVELS)
        raise argparse.ArgumentTypeError(f"{name!r}: must be one of {known} ({program.LOG_LEVEL_VARIABLE} too)")
    return name


def config_file(options: argparse.Namespace) -> str:
    """Return the config's path: --config, else that in the resumed run (ConfigError if none), else the default."""
    if options.config is not None:
        return options.config
    if options.resume in (None, AUTO):
        return DEFAULT_CONFIG
    run = Path(options.resume)
    if (saved := run / "config.yaml").is_file():
        return str(saved)
    rule = "no config.yaml in this folder; add --config FILE" if run.is_dir() else "no such run folder"
    if run.is_dir() and run.parent.name == "checkpoints":
        rule = f"a checkpoint; give the run folder, {run.parents[1]}"
    raise ConfigError(f"--resume={options.resume!r}: {rule}")


def default_config_note(options: argparse.Namespace) -> list[str]:
    """Return a line with the default config's name for a run without --config; no line for other runs."""
    if options.config is not None or options.resume not in (None, AUTO):
        return []
    return [f"note: --config: not given; using {DEFAULT_CONFIG}; colocated-grpo init writes one for your data"]


def parse_rank_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Parse a rank's command line (under torchrun, srun or alone). Return its flags and the overrides of settings.

    Sets torchrun's variables and the libraries' log level. Exits with one line if a variable or an argument is invalid.
    """
    program.prepare_streams()
    options, overrides = parser.parse_known_args(arguments)
    os.environ.update(program.rank_environment(os.environ))
    if problem := program.environment_problem(os.environ):
        parser.error(problem)
    level = getattr(options, "log_level", "WARNING")
    program.prepare_libraries(level, prefix=f"[rank {os.environ['RANK']}] ")
    return options, overrides


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank and return its exit code. Unexpected exceptions are defects and propagate."""
    parser = program.OneLineParser(
        prog="python -m colocated_grpo",
        description="Train on this rank. Started by torchrun, by srun, or alone; settings override the file.",
    )
    add_run_arguments(parser)
    options, overrides = parse_rank_arguments(parser, arguments)
    program.raise_descriptor_limit()
    program.show_crashes()
    program.exit_on_stop_signals(lambda: "stopped during start-up, before the first step")
    if verdict.VERDICT_VARIABLE in os.environ:  # the launcher has started this rank
        parents_death.stop_at_parents_death()
    with verdict.reported_exits():
        return _train(options, overrides)


def _train(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from colocated_grpo.settings.config_file import read_config
    from colocated_grpo.tracking.ending import leave_start, make_output

    default = default_config_note(options)
    try:
        check_first(overrides)
        file = config_file(options)
        name = Path(file).stem
        config, lines = checked(read_config(file, overrides), options.resume, name)
    except ConfigError as error:
        return program.exit_code(error, *default, shown=os.environ["RANK"] == "0")  # all ranks read the same settings
    output = make_output(config.tracking.console, config.training_steps, is_main=os.environ["RANK"] == "0")
    program.exit_on_stop_signals(partial(leave_start, output))
    for line in [*default, *lines]:
        output.note(line)
    return _run(config, options.resume, name, output)


def checked(loaded: LoadedConfig, resume: str | None, name: str) -> tuple[Config, list[str]]:
    """Return the settings adapted to their model, and lines to print. Raises ConfigError if the run cannot start."""
    from colocated_grpo.settings.rules import check_world

    ranks = int(os.environ["WORLD_SIZE"])
    check_world(loaded.config, ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    config, lines, problems = adapted(loaded.config, resume, name)
    if problems:
        raise ConfigError(*problems)
    return config, [*(f"note: {note}" for note in loaded.notes), *lines]


def adapted(config: Config, resume: str | None, name: str) -> tuple[Config, list[str], list[str]]:
    """Return the settings adapted to their model, notes and warnings, and the reasons why the run cannot start.

    Runs no user code. name: first part of a new run folder's name.
    """
    from colocated_grpo.environments.registry import check_names
    from colocated_grpo.rollout.vllm.versions import check_installed
    from colocated_grpo.runtime.run_folder import check_resumed
    from colocated_grpo.settings.inputs import check_inputs
    from colocated_grpo.settings.rules import exposures

    problems, notes = list[str](), list[str]()

    def adapt() -> None:
        nonlocal config, notes
        config, notes = check_inputs(config)

    names_are_known = partial(check_names, config.environments, config.evaluation.sets)
    for check in (names_are_known, adapt, lambda: check_resumed(config, resume, name), check_installed):
        try:
            check()
        except ConfigError as error:
            problems += str(error).splitlines()
    notes += passed_over(Path(config.output_dir), config.run_name, resume, name)
    lines = [f"note: {note}" for note in notes] + [f"warning: {line}" for line in exposures(config.environments)]
    return config, lines, list(dict.fromkeys(problems))  # two checks read the model and may report the same problem


def _run(config: Config, resume: str | None, name: str, output: RunOutput) -> int:
    """Train and return an exit code. Errors that the user can fix become one line; all errors are recorded."""
    from colocated_grpo.tracking.ending import record_ending

    try:
        with program.frozen_imports():  # imports torch
            joined = join_ranks(output)
        with output.phase("importing torch, transformers and vLLM"), program.frozen_imports():
            from colocated_grpo.launch.rank import main as train
        program.show_crashes()  # again: the imports have replaced the handlers
        train(config, joined, resume=resume, name=name, output=output)
    except AlreadyReported:
        output.close()
        verdict.leave(recorded=True)
        logging.getLogger(__name__).debug("another rank failed first; the error of this rank:", exc_info=True)
        return verdict.RUN_ERROR
    except BaseException as error:
        code, lines = record_ending(output, error, [config.output_dir, resume])
        if not lines and isinstance(error, SystemExit):  # exit code 0 would look like a finished run
            raise RuntimeError(f"sys.exit({error.code!r}) was called during the run") from error
        if not lines:
            raise
        verdict.report(code, lines)
        return code
    verdict.leave(finished=True)
    return 0


def passed_over(output: Path, run_name: str | None, resume: str | None, name: str) -> list[str]:
    """Return a line about runs without a checkpoint that began after the run which `--resume auto` continues."""
    from colocated_grpo.runtime.run_folder import CHECKPOINTS, complete_checkpoints, newest_run, runs_of

    if resume != AUTO or run_name:
        return []
    newest = newest_run(output, None, name)
    names = [run.name for run in runs_of(output, name) if not complete_checkpoints(run / CHECKPOINTS)]
    newer = sorted(each for each in names if newest is None or each > newest.name)  # a name ends with the start time
    line = "--resume auto: newer runs without a checkpoint are skipped: {}, the newest {}"
    return [line.format(len(newer), newer[-1])] if newer else []


def join_ranks(output: RunOutput) -> Joined:
    """Wait for the other ranks before the trainer is imported. Collective. Does not change signal handlers."""
    from colocated_grpo.runtime.joining import join
    from colocated_grpo.tracking.ending import leave_with_other_rank

    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    with output.phase("waiting for the other ranks") if several else nullcontext():
        return join(before_exit=partial(leave_with_other_rank, output))
