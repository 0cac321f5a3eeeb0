"""The error lines of a failing rank. Standard library only: the entry point of a rank imports it first."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

VERDICT_VARIABLE = "COLOCATED_GRPO_VERDICT"
"""Variable with the path of the file in which a failing rank leaves its exit code and error lines for the launcher."""
FINISHED_SUFFIX = ".finished"
"""Suffix of a second file next to that one, created by a rank whose run has ended normally. Exit code 0 is not enough:
user code may call os._exit(0)."""
STOPPED_SUFFIX = ".stopped"
"""Exists if the run has stopped on request, on this node or another, before its last step."""
FOLDER_SUFFIX = ".folder"
"""Suffix of a file with the path of the run folder."""
TRAINING_SUFFIX = ".training"
"""Suffix of a file that exists when the start is over."""
RECORDED_SUFFIX = ".recorded"
"""Suffix of a file that exists when the reason of a failure is in the run folder, or will be put there by the rank that
failed first. Otherwise the launcher records it."""
RUN_ERROR, USAGE_ERROR = 1, 2
"""Exit codes: the run failed; the settings or arguments are invalid."""


def report(code: int, lines: Sequence[str]) -> None:
    """Print the lines, or pass them and the code to the launcher, which prints them after torchrun's own output.

    The first report of a node is kept: a rank that a guard process has killed makes the other ranks fail as well.
    """
    if VERDICT_VARIABLE in os.environ:
        text = "\n".join([str(code), *lines])
        try:
            with Path(os.environ[VERDICT_VARIABLE]).open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return
        except FileExistsError:
            return
        except OSError:
            pass  # in a long run, a cleanup of /tmp may have removed the folder
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def mark(suffix: str, text: str = "") -> None:
    """Leave a file with this suffix for the launcher; nothing without a launcher."""
    if VERDICT_VARIABLE in os.environ:
        with suppress(OSError):
            Path(os.environ[VERDICT_VARIABLE]).with_suffix(suffix).write_text(text, encoding="utf-8")


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
    except Exception:
        traceback.print_exc()
        code = RUN_ERROR
    end_process(code)


def verdict_written() -> bool:
    """Return whether a rank of this node has written its error lines for the launcher."""
    return VERDICT_VARIABLE in os.environ and Path(os.environ[VERDICT_VARIABLE]).exists()


def read_verdict(path: Path) -> tuple[int, str]:
    """Return the exit code and the error lines in the launcher's file."""
    code, _, lines = path.read_text(encoding="utf-8").partition("\n")
    return int(code), lines
