"""Errors that end a run with one line instead of a traceback: the user can act on the line, the stack adds nothing."""

import shutil
from pathlib import Path


class RunError(RuntimeError):
    """The run cannot go on. The message is one line: what was measured, the limit, and what to do."""


def in_one_line(error: BaseException) -> str:
    """Type and message without newlines."""
    try:
        message = str(error)
    except Exception as another:  # user code may raise what cannot be shown
        message = f"(its message cannot be shown: {type(another).__name__})"
    return " ".join(f"{type(error).__name__}: {message}".split())


def write_failed(what: str, folder: Path, cause: str) -> RunError:
    """For a write that a full disk may have ended: the line says how much is free there."""
    free = shutil.disk_usage(folder).free / 2**30
    return RunError(f"{what}: writing to {folder} failed ({free:.3g} GiB free there): {cause}")


class ReportedElsewhere(Exception):
    """This rank ends after another one that failed first and says why."""
