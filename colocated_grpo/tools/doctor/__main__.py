"""Check a machine and a run: python -m colocated_grpo.tools.doctor [--config FILE] [--json] [flags and settings]"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from colocated_grpo.errors import ConfigError
from colocated_grpo.launch.arguments import read_launch, run_parser
from colocated_grpo.launch.launcher import read_settings
from colocated_grpo.runtime.program import Launch, prepare_streams
from colocated_grpo.runtime.verdict import USAGE_ERROR
from colocated_grpo.tools.doctor.checks import MACHINE, RUN, examine
from colocated_grpo.tools.doctor.results import Result
from colocated_grpo.tools.doctor.subject import Subject
from colocated_grpo.tracking.text import printable

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
STATUS_WIDTH = max(map(len, STYLES))
NAME_WIDTH = max(map(len, (*MACHINE, *RUN)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results. Returns 0, 1 if a check failed, or 2 if the command line is invalid."""
    prepare_streams()
    parser = run_parser()
    parser.prog = "colocated-grpo doctor"
    parser.description = "Check this machine and, with --config or --resume, the run that the same command line starts."
    parser.add_argument("--json", action="store_true", help="print a list of {name, status, detail, fix}")
    options, overrides = parser.parse_known_args(arguments)
    try:
        subject = read_subject(options, overrides, parser)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    results = examine(subject)
    if options.json:
        results = list(results)
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        results = print_report(results, Console())
    return 1 if any(result.status == "failed" for result in results) else 0


def read_subject(options: argparse.Namespace, overrides: Sequence[str], parser: argparse.ArgumentParser) -> Subject:
    """Raises ConfigError where the command line is invalid. Invalid settings are a result of the check `settings`."""
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


def print_report(results: Iterable[Result], console: Console) -> list[Result]:
    """Print each result when it arrives, then their numbers. Returns all results."""
    indent = " " * (STATUS_WIDTH + NAME_WIDTH + 4)
    printed = []
    for result in results:
        line = Text(f"{result.status:<{STATUS_WIDTH}}", style=STYLES[result.status])
        line.append(f"  {result.name:<{NAME_WIDTH}}  {_shown(result.detail, console)}", style="not bold default")
        console.print(line, soft_wrap=True)
        if result.fix:
            console.print(Text(f"{indent}fix: {_shown(result.fix, console)}"), soft_wrap=True)
        printed.append(result)
    counts = Counter[str](result.status for result in printed)
    console.print(Text(", ".join(f"{counts[status]} {status}" for status in STYLES)), soft_wrap=True)
    return printed


def _shown(text: str, console: Console) -> str:
    """Return text on one line, without escape sequences: servers and files supply some of it."""
    return printable(" ".join(text.split()), console.encoding)


if __name__ == "__main__":
    sys.exit(main())
