"""Check a machine, then a run by a dry run: colocated-grpo doctor [--config FILE] [flags and settings]"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from colocated_grpo.errors import ConfigError
from colocated_grpo.launch import cli, launcher
from colocated_grpo.runtime.program import exit_code, prepare_streams
from colocated_grpo.tools.doctor import machine
from colocated_grpo.tools.doctor.subject import Finding, Subject
from colocated_grpo.tracking.text import printable

CHECKS: Mapping[str, Callable[[Subject], Finding]] = {
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

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
STATUS_WIDTH = max(map(len, STYLES))
NAME_WIDTH = max(map(len, CHECKS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results. Returns 0, 1 if a check failed, or 2 if the command line, the config or the run is invalid."""
    prepare_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = cli.run_parser()
    parser.prog = "colocated-grpo doctor"
    then = "make a dry run of the run that the same command line starts"
    parser.description = f"Check this machine and, with --config, --resume or atropos, {then}."
    try:
        options, overrides, _ = cli.read_arguments(arguments, parser)
        has_config = options.config is not None or options.resume is not None
        if not has_config:
            options.config = "none"  # not read
        launch = cli.read_launch(options, overrides)
        if overrides and not has_config:
            raise ConfigError(f"{overrides[0]}: a setting needs a config; add --config FILE")
        if has_config:
            launcher.read_settings(launch)
    except ConfigError as error:
        return exit_code(error)
    subject = Subject(launch=launch, environment=dict(os.environ))
    findings = print_report(((name, check(subject)) for name, check in CHECKS.items()), Console())
    code = 1 if any(finding.status == "failed" for finding in findings) else 0
    if not has_config or subject.imports.transformers is None:  # which a dry run needs
        return code
    print(flush=True)
    return launcher.main([*arguments, "--dry-run"]) or code


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
