"""The program in a completion."""

from __future__ import annotations

FENCE = "```"


def last_code_block(text: str) -> str | None:
    """Return the content of the last closed block between ``` fences; None if there is none.

    The rest of the opening line, such as "python", is not part of it.
    """
    parts = text.split(FENCE)
    blocks = [part for part in parts[1:-1:2] if "\n" in part]
    return blocks[-1].partition("\n")[2] if blocks else None
