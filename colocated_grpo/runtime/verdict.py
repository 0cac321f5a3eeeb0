"""The error lines of a failing rank. Standard library only: the entry point of a rank imports it first."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

VERDICT_VARIABLE = "COLOCATED_GRPO_VERDICT"
"""Variable with the path of the file in which a failing rank leaves its exit code and error lines for the launcher."""
FINISHED_SUFFIX = ".finished"
"""Suffix of a second file next to that one, created by a rank whose run has ended normally. Exit code 0 is not enough:
user code may call os._exit(0)."""
RUN_ERROR, USAGE_ERROR = 1, 2
"""Exit codes: the run failed; the settings or arguments are invalid."""


def report(code: int, lines: Sequence[str]) -> None:
    """Print the lines, or pass them and the code to the launcher, which prints them after torchrun's own output."""
    if VERDICT_VARIABLE in os.environ:
        text = "\n".join([str(code), *lines])
        with suppress(OSError):  # in a long run, a cleanup of /tmp may have removed the folder
            Path(os.environ[VERDICT_VARIABLE]).write_text(text, encoding="utf-8", errors="backslashreplace")
            return
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def verdict_written() -> bool:
    """Return whether a rank of this node has written its error lines for the launcher."""
    return VERDICT_VARIABLE in os.environ and Path(os.environ[VERDICT_VARIABLE]).exists()
