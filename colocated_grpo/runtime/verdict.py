"""Records how each process of a run ended: one JSON file per rank, read by the launcher. Standard library only."""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

from colocated_grpo.runtime.user_code import explain_blocked, line_of_frame

VERDICT_VARIABLE = "COLOCATED_GRPO_VERDICT"
"""Environment variable with the launcher's temporary folder, where the processes of its node write their files."""
STACKS = ".stacks"
"""Suffix of the file with the stacks of a rank's threads. The file is written if user code has blocked all threads."""
FINISHED, STOPPED, FAILED, KILLED = "finished", "stopped", "failed", "killed"
"""Outcomes of a run."""
RUN_ERROR, USAGE_ERROR = 1, 2
"""Exit codes: the run failed; the settings or arguments are invalid."""


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    rank: int | None = None
    """None: the launcher."""
    folder: str | None = None
    """The run folder."""
    training: bool = False
    """True after startup."""
    finished: bool = False
    """The run has ended normally. Exit code 0 is no proof, because user code may call os._exit(0)."""
    stopped: bool = False
    """The run has stopped on request, on this node or another, before its last step."""
    recorded: bool = False
    """The reason for a failure is in the run folder, or will be written there by the rank that failed first."""
    code: int | None = None
    """Exit code of a process that has reported its end. The report also contains the lines to print."""
    lines: Sequence[str] = ()
    reported: float = 0.0
    """time.time() of the report. The first report of a node shows the cause: that exit makes other ranks fail."""


_own = ProcessEnd()


def leave(**changes: object) -> bool:
    """Update this process's verdict for the launcher. Return False if there is no launcher."""
    global _own
    if VERDICT_VARIABLE not in os.environ:
        return False
    _own = replace(_own, rank=int(os.environ["RANK"]), **changes)  # pyrefly: ignore[bad-argument-type]
    return write_verdict(Path(os.environ[VERDICT_VARIABLE]) / f"rank_{_own.rank}.json", _own)


def write_verdict(file: Path, verdict: ProcessEnd) -> bool:
    """Write a verdict. Return False on failure: during a long run, a cleanup of /tmp may have removed the folder."""
    new = file.with_suffix(".new")
    try:
        new.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
        new.replace(file)
    except OSError:
        return False
    return True


def stacks_file() -> Path | None:
    """Return the file for this rank's stacks; None without a launcher to read it."""
    folder = Path(os.environ.get(VERDICT_VARIABLE, os.devnull))
    return folder / f"rank_{os.environ['RANK']}{STACKS}" if folder.is_dir() else None


def report(code: int, lines: Sequence[str]) -> None:
    """Print the lines, or pass them and the code to the launcher, which prints them once all ranks have ended.

    The first report of a process reaches the launcher; later ones are dropped.
    """
    if _own.code is None and not leave(code=code, lines=list(lines), reported=time.time()):
        print(*lines, sep="\n", file=sys.stderr, flush=True)


@contextmanager
def reported_exits() -> Generator[None]:
    """Report user code that calls os._exit() in this process, which would end it without a message, or as a success."""
    original, process, ending = os._exit, os.getpid(), threading.Lock()

    def report_exit(status: int) -> NoReturn:
        line = line_of_frame(sys._getframe(1))
        if line is None or os.getpid() != process:  # this package, or a forked child
            original(status)
        ending.acquire()  # never released: several threads may score, and the first ends the process
        report(RUN_ERROR, [f"error: {line} ended the process by os._exit({status})"])
        end_process(RUN_ERROR)

    os._exit = report_exit
    try:
        yield
    finally:
        os._exit = original


def ended_from_outside(what: str) -> str:
    """Return the line for processes that a signal has ended. what: for example 'rank 1 by SIGKILL'."""
    return (
        f"error: the run was ended from outside, {what}: for example by the system because memory ran out, or by a "
        "crash inside a library; --resume auto continues from the last checkpoint"
    )


def read_verdicts(folder: Path) -> list[ProcessEnd]:
    """Return the verdicts of this node's processes. Verdicts with a report come first, in the order of the reports.

    A rank blocked by user code has written only its stacks, and comes before all others.
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
    """Return the first report of this node's processes; None if there is none."""
    if VERDICT_VARIABLE not in os.environ:
        return None
    verdicts = read_verdicts(Path(os.environ[VERDICT_VARIABLE]))
    return verdicts[0] if verdicts and verdicts[0].code is not None else None


def end_process(code: int) -> NoReturn:
    """Flush the output and exit at once.

    sys.exit would join the threads of rewards that never return. On a failed rank, the teardown of the process group,
    torch and vLLM could also abort the process and hide its exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        # The terminal may be closed, or the stream may be None or closed by user code.
        with suppress(OSError, AttributeError, ValueError):
            stream.flush()
    os._exit(code)


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run the `main` of a program that builds an engine. Print the traceback of an error; exit by `end_process`."""
    try:
        code = main()
    except SystemExit:  # raised by argparse for --help and for invalid arguments
        raise
    except KeyboardInterrupt:  # Ctrl-C, of a program without the launcher
        print("\nstopped", file=sys.stderr)
        code = 130  # 128 + SIGINT
    except BaseException:  # torch's CheckpointException does not derive from Exception
        traceback.print_exc()
        code = RUN_ERROR
    end_process(code)
