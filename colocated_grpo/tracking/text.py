"""Formatting of numbers, durations and untrusted text for console, report and tools."""

import math
from collections.abc import Callable, Mapping
from html import escape

from colocated_grpo.errors import visible
from colocated_grpo.types import STDERR

LEFT_OUT = "\n[...]\n"
Note = Callable[[str], None]
"""Shows one line to the user."""


def number(value: float | None) -> str:
    """Format with about four significant digits; '-' for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return "-"
    if (size := abs(value)) >= 1000:
        return f"{value:,.0f}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}" if value == int(value) else f"{value:.1f}"
    if size >= 10:
        return f"{value:.2f}"
    if size >= 0.01:
        return f"{value:.3f}"
    return f"{value:.4f}" if size >= 0.001 else f"{value:.1e}"


def figure(row: Mapping[str, float | None], key: str) -> str:
    """Format a metric of the row, with its standard error if the row has it. Example: '0.105 +- 0.042'."""
    return with_error(row.get(key), row.get(key + STDERR))


def with_error(value: float | None, error: float | None) -> str:
    return number(value) + ("" if error is None else f" +- {number(error)}")


def duration(seconds: float) -> str:
    """Format a duration. Example: 3725 -> '1h 02m', 75 -> '1m 15s', 4.2 -> '4s'."""
    if (whole := round(seconds)) >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def printable(text: str, encoding: str = "utf-8") -> str:
    """Return `visible` text that the given encoding can represent, with other characters escaped."""
    return visible(text).encode(encoding, "backslashreplace").decode(encoding)


def without_middle(text: str, limit: int) -> str:
    """Return the text; of one with more than `limit` characters, its beginning and its end."""
    if len(text) <= limit:
        return text
    half = (limit - len(LEFT_OUT)) // 2
    return text[:half] + LEFT_OUT + text[-half:]


def as_html(value: object) -> str:
    """Return the value as text, escaped by `visible` and for HTML."""
    return escape(visible(str(value)))
