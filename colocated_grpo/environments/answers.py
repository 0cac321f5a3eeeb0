"""Where the answer stands in a completion."""

from __future__ import annotations

import re

OPEN, CLOSE = "<answer>", "</answer>"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?", re.ASCII)


def final_answer(completion: str) -> str:
    """Inside of the last <answer>...</answer>; without one, what follows the last </think>, or all of it. Stripped."""
    end = completion.rfind(CLOSE)
    start = completion.rfind(OPEN, 0, end) if end >= 0 else -1
    if start >= 0:
        return completion[start + len(OPEN) : end].strip()
    return completion.rpartition("</think>")[2].strip()


def last_number(text: str) -> str | None:
    """The last decimal number, thousands separators removed."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None
