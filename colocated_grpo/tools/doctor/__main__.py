"""Check a machine and the memory of a run: colocated-grpo doctor [--config FILE] [flags and settings]

`--dry-run` of the same command line checks what this leaves out: settings, model, files, data and code.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from colocated_grpo.errors import ConfigError
from colocated_grpo.launch.cli import read_arguments, read_launch, run_parser
from colocated_grpo.launch.launcher import read_settings
from colocated_grpo.runtime.program import exit_code, prepare_streams
from colocated_grpo.tools.doctor import machine
from colocated_grpo.tools.doctor.subject import Finding, Subject
from colocated_grpo.tracking.text import printable

Check = Callable[[Subject], Finding]

MACHINE: Mapping[str, Check] = {
    "gpus": machine.check_gpus,
    "gpu_memory": machine.check_gpu_memory,
    "torch": machine.check_torch,
    "transformers": machine.check_transformers,
    "vllm": machine.check_vllm,
    "variables": machine.check_variables,
    "shared_memory": machine.check_shared_memory,
    "hostnames": machine.check_hostnames,
    "collective": machine.check_collective,
}
"""Checks that need no config."""
RUN: Mapping[str, Check] = {"memory": machine.check_memory, "disk": machine.check_disk}
"""Checks of the run that a config describes."""

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
STATUS_WIDTH = max(map(len, STYLES))
NAME_WIDTH = max(map(len, (*MACHINE, *RUN)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results. Returns 0, 1 if a check failed, or 2 if the command line or the config is invalid."""
    prepare_streams()
    try:
        options, overrides, _ = read_arguments(sys.argv[1:] if arguments is None else arguments, doctor_parser())
        has_config = options.config is not None or options.resume is not None
        if not has_config:
            options.config = "none"  # not read
        launch = read_launch(options, overrides)
        if overrides and not has_config:
            raise ConfigError(f"{overrides[0]}: a setting needs a config; add --config FILE")
        config = read_settings(launch)[0] if has_config else None
    except ConfigError as error:
        return exit_code(error)
    subject = Subject(launch=launch, config=config, environment=dict(os.environ))
    checks = {**MACHINE, **(RUN if has_config else {})}
    findings = print_report(((name, check(subject)) for name, check in checks.items()), Console())
    return 1 if any(finding.status == "failed" for finding in findings) else 0


def doctor_parser() -> argparse.ArgumentParser:
    parser = run_parser()
    parser.prog = "colocated-grpo doctor"
    parser.description = (
        "Check this machine and, with --config, --resume or atropos, memory and disk space of the run that the same "
        "command line starts."
    )
    return parser


def print_report(findings: Iterable[tuple[str, Finding]], console: Console) -> list[Finding]:
    """Print each finding when it arrives, then counts by status. Returns all findings."""
    indent = " " * (STATUS_WIDTH + NAME_WIDTH + 4)
    printed = []
    for name, finding in findings:
        line = Text(f"{finding.status:<{STATUS_WIDTH}}", style=STYLES[finding.status])
        line.append(f"  {name:<{NAME_WIDTH}}  {_shown(finding.detail, console)}", style="not bold default")
        console.print(line, soft_wrap=True)
        if finding.fix:
            console.print(Text(f"{indent}fix: {_shown(finding.fix, console)}"), soft_wrap=True)
        printed.append(finding)
    counts = Counter[str](finding.status for finding in printed)
    console.print(Text(", ".join(f"{counts[status]} {status}" for status in STYLES)), soft_wrap=True)
    return printed


def _shown(text: str, console: Console) -> str:
    """Return text on one line, without escape sequences: libraries supply some of the text."""
    return printable(" ".join(text.split()), console.encoding)


if __name__ == "__main__":
    sys.exit(main())
