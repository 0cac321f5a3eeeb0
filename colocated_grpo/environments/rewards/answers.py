"""Where the answer stands in a completion, behind thoughts or between tags."""

from __future__ import annotations

import re

OPEN, CLOSE = "<answer>", "</answer>"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?", re.ASCII)


def without_thoughts(reply: str) -> str:
    """What follows the last </think>; all of it where there is none."""
    return reply.rpartition("</think>")[2]


def final_answer(completion: str) -> str:
    """Inside of the last <answer>...</answer>; without one, the completion without its thoughts. Stripped."""
    end = completion.rfind(CLOSE)
    start = completion.rfind(OPEN, 0, end) if end >= 0 else -1
    if start >= 0:
        return completion[start + len(OPEN) : end].strip()
    return without_thoughts(completion).strip()


def last_number(text: str) -> str | None:
    """The last decimal number, thousands separators removed."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None
