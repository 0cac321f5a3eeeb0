"""Results of checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed", "skipped"]
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check. `fix` is empty unless the status is warning or failed."""

    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A finding with the name of its check."""

    name: str
    status: Status
    detail: str
    fix: str


def ok(detail: str) -> Finding:
    return Finding("ok", detail)


def skipped(detail: str) -> Finding:
    return Finding("skipped", detail)


def warning(detail: str, fix: str) -> Finding:
    return Finding("warning", detail, fix)


def failed(detail: str, fix: str) -> Finding:
    return Finding("failed", detail, fix)


def failed_line(line: str, fix: str) -> Finding:
    """Return a failure for an error line of the form `key=value: what is wrong; what to do`.

    fix: used where the line does not say what to do.
    """
    wrong, _, remedy = line.partition("; ")
    return failed(wrong, remedy or fix)


def gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"
