"""How each process of a run has ended: one JSON file a rank, which the launcher reads. Standard library only."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

from colocated_grpo.runtime.user_code import explain_blocked

VERDICT_VARIABLE = "COLOCATED_GRPO_VERDICT"
"""Variable with the launcher's temporary folder, in which the processes of its node leave their files."""
STACKS = ".stacks"
"""Suffix of the file with the stacks of a rank's threads, written if user code has kept all of them from running."""
RUN_ERROR, USAGE_ERROR = 1, 2
"""Exit codes: the run failed; the settings or arguments are invalid."""


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """State of one process."""

    folder: str | None = None
    """The run folder."""
    training: bool = False
    """The start is over."""
    finished: bool = False
    """The run has ended normally. Exit code 0 is not enough: user code may call os._exit(0)."""
    stopped: bool = False
    """The run has stopped on request, on this node or another, before its last step."""
    recorded: bool = False
    """The reason of a failure is in the run folder, or will be put there by the rank that failed first."""
    code: int | None = None
    """Exit code of a process that has reported its end, with the lines to show."""
    lines: Sequence[str] = ()
    reported: float = 0.0
    """time.time() of the report. The first one of a node counts: its end makes the other ranks fail as well."""


_own = ProcessEnd()


def leave(**changes: object) -> bool:
    """Change the verdict of this process, for the launcher. Return False if there is none."""
    global _own
    if VERDICT_VARIABLE not in os.environ:
        return False
    _own = replace(_own, **changes)  # pyrefly: ignore[bad-argument-type]
    return write_verdict(Path(os.environ[VERDICT_VARIABLE]) / f"{process_name()}.json", _own)


def write_verdict(file: Path, verdict: ProcessEnd) -> bool:
    """Write a verdict. Return False where that fails: in a long run, a cleanup of /tmp may have removed the folder."""
    new = file.with_suffix(".new")
    try:
        new.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
        new.replace(file)
    except OSError:
        return False
    return True


def process_name() -> str:
    """Return 'rank_3' in a rank, and 'agent' in torchrun."""
    return f"rank_{os.environ['RANK']}" if "RANK" in os.environ else "agent"


def stacks_file() -> Path | None:
    """Return the file for the stacks of this rank, if there is a launcher that reads it."""
    folder = Path(os.environ.get(VERDICT_VARIABLE, os.devnull))
    return folder / f"{process_name()}{STACKS}" if folder.is_dir() else None


def report(code: int, lines: Sequence[str]) -> None:
    """Print the lines, or pass them and the code to the launcher, which prints them after torchrun's own output.

    The launcher gets the first report of a process only.
    """
    if _own.code is None and not leave(code=code, lines=list(lines), reported=time.time()):
        print(*lines, sep="\n", file=sys.stderr, flush=True)


def read_verdicts(folder: Path) -> list[ProcessEnd]:
    """Return the verdicts of the processes of this node; those with a report first, in the order of their reports.

    A rank that user code has blocked left its stacks only, and comes first.
    """
    found = []
    for file in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError):
            found.append(ProcessEnd(**json.loads(file.read_text(encoding="utf-8"))))
    blocked = [
        ProcessEnd(code=RUN_ERROR, lines=[line]) for line in map(explain_blocked, folder.glob(f"*{STACKS}")) if line
    ]
    return blocked + sorted(found, key=lambda one: one.reported if one.code is not None else float("inf"))


def first_report() -> ProcessEnd | None:
    """Return the first report of a process of this node; None if there is none."""
    if VERDICT_VARIABLE not in os.environ:
        return None
    verdicts = read_verdicts(Path(os.environ[VERDICT_VARIABLE]))
    return verdicts[0] if verdicts and verdicts[0].code is not None else None


def end_process(code: int) -> NoReturn:
    """Flush the output and exit at once.

    sys.exit would join the threads of rewards that never return. On a failing rank, tearing down the process group,
    torch and vLLM could also abort the process and hide its exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        # The terminal may be closed, the stream None, or closed by user code.
        with suppress(OSError, AttributeError, ValueError):
            stream.flush()
    os._exit(code)


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run the `main` of a program that builds an engine, show the traceback of an error, and end as `end_process`."""
    try:
        code = main()
    except SystemExit:  # raised by argparse for --help and for invalid arguments
        raise
    except BaseException:  # torch's CheckpointException does not derive from Exception
        traceback.print_exc()
        code = RUN_ERROR
    end_process(code)
