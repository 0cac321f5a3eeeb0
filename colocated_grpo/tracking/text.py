"""How numbers, durations and foreign text are written for people: console, report and tools share these."""

import math
import unicodedata
from html import escape

HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


def number(value: float | None) -> str:
    """Short form with about four significant digits; '-' where there is no finite number to show."""
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 10_000:
        return f"{value:,.0f}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}" if value == int(value) else f"{value:.1f}"
    if size >= 10:
        return f"{value:.2f}"
    if size >= 0.01:
        return f"{value:.3f}"
    return f"{value:.4f}" if size >= 0.001 else f"{value:.1e}"


def duration(seconds: float) -> str:
    """Example: 3725 -> '1h 02m', 75 -> '1m 15s', 4.2 -> '4s'."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    if whole >= 60:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole}s"


def visible(text: str) -> str:
    """Text that is safe to print: control, direction-override and surrogate characters become \\xNN or \\uNNNN.

    Completions are written by a model: escape sequences could repaint a terminal, lone surrogates cannot be encoded.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def printable(text: str, encoding: str = "utf-8") -> str:
    """`visible` text that also survives a terminal or log file of the given encoding."""
    return visible(text).encode(encoding, "backslashreplace").decode(encoding)


def as_html(value: object) -> str:
    """`visible` text for a page."""
    return escape(visible(str(value)))


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in HIDDEN_CATEGORIES:
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
