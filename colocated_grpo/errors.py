"""Errors that end a run with one line instead of a traceback: the user can act on the line, the stack adds nothing."""

import shutil
import unicodedata
from pathlib import Path

HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


class ConfigError(ValueError):
    """Settings or arguments that cannot be run. The message has one line per problem."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(" ".join(line.split()) for line in lines))


class RunError(RuntimeError):
    """The run cannot continue. The message is one line: what was measured, the limit, and what to do."""


class NothingUsable(RunError):
    """Data or rewards are not usable. The state of the run is sound, so a checkpoint is saved before the run ends."""


class AlreadyReported(Exception):
    """This rank ends because another rank failed first, and that rank reports the cause."""


def in_one_line(error: BaseException) -> str:
    """Return the error's type and message on one line. Characters that could change a terminal are escaped."""
    try:
        message = str(error)
    except Exception as another:  # an exception of user code may fail to format itself
        message = f"(its message cannot be shown: {type(another).__name__})"
    return visible(" ".join(f"{type(error).__name__}: {message}".split()))


def visible(text: str) -> str:
    """Escape control, direction-override and surrogate characters as \\xNN or \\uNNNN.

    A model writes the completions: escape sequences could repaint a terminal, and lone surrogates cannot be encoded.
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in HIDDEN_CATEGORIES:
        return character
    if (code := ord(character)) < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shortened(text: str, limit: int) -> str:
    """Cut a text to `limit` characters, of which the last three are dots."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


CONTINUES = "--resume auto continues from the last checkpoint"


def write_failed(what: str, folder: Path, cause: str) -> RunError:
    """Return the error for a failed write. Its line includes the free disk space: a full disk is the usual reason."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    return RunError(f"{what}: writing to {folder} failed ({free:.3g} GiB free there): {cause}")
