"""Errors that end a run with one line instead of a traceback: the user can act on the line, the stack adds nothing."""

import shutil
from pathlib import Path


class RunError(RuntimeError):
    """The run cannot go on. The message is one line: what was measured, the limit, and what to do."""


def write_failed(what: str, folder: Path, cause: str) -> RunError:
    free = shutil.disk_usage(folder).free / 2**30
    return RunError(f"{what}: writing to {folder} failed ({free:.3g} GiB free there): {cause}")


class ReportedElsewhere(Exception):
    """This rank ends after another one that failed first and says why."""
