"""Entry point of a rank: `python -m colocated_grpo [--config FILE]`, under torchrun, under srun, or alone.

Only the standard library is imported at the top, because environment variables that torch and vLLM read on import must
be set first.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from colocated_grpo.errors import AlreadyReported, ConfigError
from colocated_grpo.runtime import program
from colocated_grpo.runtime.verdict import RUN_ERROR, USAGE_ERROR, leave, report

if TYPE_CHECKING:
    from colocated_grpo.runtime.joining import Joined
    from colocated_grpo.settings.config_file import LoadedConfig
    from colocated_grpo.settings.schema import Config
    from colocated_grpo.tracking import RunOutput

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
        raise argparse.ArgumentTypeError(
            f"{name!r}: must be one of {', '.join(program.LOG_LEVELS)} ({program.LOG_LEVEL_VARIABLE} too)"
        )
    return name


def config_file(options: argparse.Namespace) -> str:
    """Return the path of the config file: from --config, else in the resumed run folder, else the default.

    Raises ConfigError if the folder in --resume RUN has no config.
    """
    if options.config is not None:
        return options.config
    if options.resume in (None, AUTO):
        return DEFAULT_CONFIG
    run = Path(options.resume)
    if (saved := run / "config.yaml").is_file():
        return str(saved)
    rule = "no config.yaml in this folder; add --config FILE" if run.is_dir() else "no such run folder"
    raise ConfigError(f"--resume={options.resume!r}: {rule}")


def default_config_note(options: argparse.Namespace) -> list[str]:
    """Return a line with the default config's name for a run without --config; no line for other runs."""
    if options.config is not None or options.resume not in (None, AUTO):
        return []
    return [
        f"note: --config: not given; using {DEFAULT_CONFIG}; --config FILE chooses another, "
        "colocated-grpo init writes one for your data"
    ]


LAUNCHER_FLAGS = {"--dry-run", "--engine-gpus", "--gpus", "--log-dir", "--nodes", "--nproc", "--redirect-output"}
"""Flags that users may add to the command of a rank."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank and return its exit code. Unexpected exceptions are defects and propagate."""
    parser = program.OneLineParser(
        prog="python -m colocated_grpo",
        description="Train on this rank. Started by torchrun, by srun, or alone; settings override the file.",
        allow_abbrev=False,
    )
    add_run_arguments(parser)
    options, overrides = program.parse_rank_arguments(parser, arguments)
    if misplaced := {argument.partition("=")[0] for argument in overrides} & LAUNCHER_FLAGS:
        parser.error(f"{min(misplaced)}: a flag of the launcher; write colocated-grpo instead of {parser.prog}")
    program.prepare_libraries(options.log_level, prefix=f"[rank {os.environ['RANK']}] ")
    program.raise_descriptor_limit()
    faulthandler.enable()
    program.exit_on_stop_signals(lambda: "stopped during start-up, before the first step")
    return _train(options, overrides)


def _train(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from colocated_grpo.settings.config_file import read_config
    from colocated_grpo.tracking import make_output
    from colocated_grpo.tracking.ending import leave_start

    default = default_config_note(options)
    try:
        file = config_file(options)
        name = Path(file).stem
        config, lines = checked(read_config(file, overrides), options.resume, name)
    except ConfigError as error:
        if os.environ["RANK"] == "0":  # all ranks read the same settings
            print(*default, *program.error_text(str(error).splitlines()), sep="\n", file=sys.stderr, flush=True)
        return USAGE_ERROR
    output = make_output(config.tracking.console, config.training_steps, is_main=os.environ["RANK"] == "0")
    program.exit_on_stop_signals(partial(leave_start, output))
    for line in [*default, *lines]:
        output.note(line)

    from torch.distributed.elastic.multiprocessing.errors import record

    # `record` saves this rank's traceback. At the end, torchrun prints the traceback of the first failed rank.
    code = record(_run)(config, options.resume, name, output)
    assert code is not None
    return code


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

    Checks model, files, functions, packages and the run to resume, without running user code. name: first part of a new
    run folder's name.
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

    sources = config.sources
    checks = (lambda: check_names(sources), adapt, lambda: check_resumed(config, resume, name), check_installed)
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += str(error).splitlines()
    lines = [f"note: {note}" for note in notes] + [f"warning: {line}" for line in exposures(config.environments)]
    return config, lines, list(dict.fromkeys(problems))  # two checks read the model and may report the same problem


def _import_trainer() -> Callable[..., None]:
    with program.frozen_imports():
        from colocated_grpo.launch.rank import main
    return main


def _run(config: Config, resume: str | None, name: str, output: RunOutput) -> int:
    """Train and return an exit code. Errors that the user can fix become one line; all errors are recorded."""
    from colocated_grpo.tracking.ending import record_ending

    try:
        joined = join_ranks(output)
        with output.phase("importing torch, transformers and vLLM"):
            train = _import_trainer()
        train(config, joined, resume=resume, name=name, output=output)
    except AlreadyReported:
        output.close()
        leave(recorded=True)
        logging.getLogger(__name__).debug("another rank failed first; the error of this rank:", exc_info=True)
        return RUN_ERROR
    except BaseException as error:
        code, lines = record_ending(output, error, [config.output_dir, resume])
        if isinstance(error, SystemExit):  # raised by user code; exit code 0 would look like a finished run
            raise RuntimeError(f"sys.exit({error.code!r}) was called during the run") from error
        if not lines:
            raise
        report(code, lines)
        return code
    leave(finished=True)
    return 0


def join_ranks(output: RunOutput) -> Joined:
    """Wait for the other ranks before the trainer is imported. Collective. Does not change signal handlers."""
    from colocated_grpo.runtime.joining import join
    from colocated_grpo.tracking.ending import leave_with_other_rank

    with output.phase("waiting for the other ranks"):
        return join(before_exit=partial(leave_with_other_rank, output))
