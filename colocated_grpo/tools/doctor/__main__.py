"""Check a machine and a run: python -m colocated_grpo.tools.doctor [--config FILE] [--json] [flags and settings]"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial

from rich.console import Console
from rich.text import Text

from colocated_grpo.errors import ConfigError, in_one_line
from colocated_grpo.launch.arguments import read_launch, run_parser
from colocated_grpo.launch.launcher import read_arguments, read_settings
from colocated_grpo.runtime.program import Launch, prepare_streams
from colocated_grpo.runtime.verdict import USAGE_ERROR
from colocated_grpo.tools.doctor import machine, model_checks, network, run_checks
from colocated_grpo.tools.doctor.subject import Finding, Subject, failed
from colocated_grpo.tracking.text import printable

MAX_SECONDS = 90.0
"""Limit of a single check. Checks end within seconds on a healthy machine. Checks that start processes have lower
limits of their own."""

Check = Callable[[Subject], Finding]

MACHINE: Mapping[str, Check] = {
    "gpus": machine.check_gpus,
    "driver": machine.check_driver,
    "gpu_memory": machine.check_gpu_memory,
    "nvlink": machine.check_nvlink,
    "torch": machine.check_torch,
    "torch_parts": machine.check_torch_parts,
    "transformers": machine.check_transformers,
    "vllm": machine.check_vllm,
    "packages": machine.check_packages,
    "variables": machine.check_variables,
    "shared_memory": machine.check_shared_memory,
    "hostnames": network.check_hostnames,
    "collective": network.check_collective,
    "settings": run_checks.check_settings,
}
"""Checks that need no config."""
RUN: Mapping[str, Check] = {
    "optional_packages": machine.check_optional_packages,
    "files": run_checks.check_files,
    "model": model_checks.check_model,
    "model_files": model_checks.check_model_files,
    "memory": model_checks.check_memory,
    "disk": model_checks.check_disk,
    "run_folder": run_checks.check_run_folder,
    "wandb": run_checks.check_wandb,
    "ports": network.check_ports,
    "engine_servers": run_checks.check_engine_servers,
    "weight_bridge": run_checks.check_weight_bridge,
    "environments": run_checks.check_environments,
    "atropos_api": run_checks.check_atropos_api,
    "atropos_environments": run_checks.check_atropos_environments,
    "server_type": run_checks.check_server_type,
    "logprobs": run_checks.check_atropos_logprobs,
}
"""Checks of the run that a config describes; left out without a valid config."""

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
STATUS_WIDTH = max(map(len, STYLES))
NAME_WIDTH = max(map(len, (*MACHINE, *RUN)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results. Returns 0, 1 if a check failed, or 2 if the command line is invalid."""
    prepare_streams()
    try:
        options, overrides, _ = read_arguments(sys.argv[1:] if arguments is None else arguments, doctor_parser)
        subject = read_subject(options, overrides, doctor_parser())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        findings = dict(examine(subject))
        print(json.dumps([{"name": name, **asdict(one)} for name, one in findings.items()], indent=2))
    else:
        findings = print_report(examine(subject), Console())
    return 1 if any(finding.status == "failed" for finding in findings.values()) else 0


def doctor_parser() -> argparse.ArgumentParser:
    parser = run_parser()
    parser.prog = "colocated-grpo doctor"
    parser.description = (
        "Check this machine and, with --config, --resume or atropos, the run that the same command line starts."
    )
    parser.add_argument("--json", action="store_true", help="print a list of {name, status, detail, fix}")
    return parser


def read_subject(options: argparse.Namespace, overrides: Sequence[str], parser: argparse.ArgumentParser) -> Subject:
    """Return the subject. Raises ConfigError if the command line is invalid.

    The check `settings` reports invalid settings.
    """
    has_config = options.config is not None or options.resume is not None
    if not has_config:
        options.config = "none"  # not read
    launch = read_launch(options, overrides, parser)
    if overrides and not has_config:
        raise ConfigError(f"{overrides[0]}: a setting needs a config; add --config FILE")
    environment = dict(os.environ)
    if not has_config:
        return Subject(launch=launch, config=None, environment=environment)
    return _with_settings(launch, environment)


def _with_settings(launch: Launch, environment: dict[str, str]) -> Subject:
    try:
        config, _ = read_settings(launch)
    except ConfigError as error:
        errors = tuple(str(error).splitlines())
        return Subject(launch=launch, config=None, config_errors=errors, environment=environment)
    return Subject(launch=launch, config=config, environment=environment)


def examine(subject: Subject) -> Iterator[tuple[str, Finding]]:
    """Yield names and findings in the order of the tables, each as soon as it is known."""
    for name, check in [*MACHINE.items(), *(RUN.items() if subject.config is not None else ())]:
        yield name, bounded(partial(check, subject))


def bounded(check: Callable[[], Finding], seconds: float = MAX_SECONDS) -> Finding:
    """Return the finding of a check, or a failure if it raises or takes longer than `seconds`."""
    found: list[Finding] = []

    def run() -> None:
        try:
            found.append(check())
        except Exception as error:  # one broken check must not hide the results of other checks
            found.append(failed(f"the check itself failed: {in_one_line(error)}", "report this as a defect"))

    # A daemon: a check that hangs, for example in a name lookup, does not keep the process alive.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else failed(f"no result after {seconds:g} s", "repeat; check network and file system")


def print_report(findings: Iterable[tuple[str, Finding]], console: Console) -> dict[str, Finding]:
    """Print each finding when it arrives, then counts by status. Returns all findings by name."""
    indent = " " * (STATUS_WIDTH + NAME_WIDTH + 4)
    printed = {}
    for name, finding in findings:
        line = Text(f"{finding.status:<{STATUS_WIDTH}}", style=STYLES[finding.status])
        line.append(f"  {name:<{NAME_WIDTH}}  {_shown(finding.detail, console)}", style="not bold default")
        console.print(line, soft_wrap=True)
        if finding.fix:
            console.print(Text(f"{indent}fix: {_shown(finding.fix, console)}"), soft_wrap=True)
        printed[name] = finding
    counts = Counter[str](finding.status for finding in printed.values())
    console.print(Text(", ".join(f"{counts[status]} {status}" for status in STYLES)), soft_wrap=True)
    return printed


def _shown(text: str, console: Console) -> str:
    """Return text on one line, without escape sequences: servers and files supply some of the text."""
    return printable(" ".join(text.split()), console.encoding)


if __name__ == "__main__":
    sys.exit(main())
