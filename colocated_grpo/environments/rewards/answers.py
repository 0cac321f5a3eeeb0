"""Extraction of answers from completions."""

import re
from collections.abc import Iterator
from decimal import Decimal

OPEN, CLOSE = "<answer>", "</answer>"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?", re.ASCII)


def without_thoughts(text: str) -> str:
    """Return the text after the last </think>, or all of it if there is none."""
    return text.rpartition("</think>")[2]


def final_answer(completion: str) -> str:
    """Return the content of the last <answer>...</answer>, else the completion without its thoughts. Stripped."""
    end = completion.rfind(CLOSE)
    start = completion.rfind(OPEN, 0, end) if end >= 0 else -1
    if start >= 0:
        return completion[start + len(OPEN) : end].strip()
    return without_thoughts(completion).strip()


def tagged_parts(text: str, opening: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield name and content of each <name>content</name>, in time linear in the text.

    opening: matches opening tags, with the name as its first group. A regular expression for the whole element takes
    quadratic time on a long run of opening tags that are not closed.
    """
    unclosed: set[str] = set()
    position = 0
    while found := opening.search(text, position):
        position, name = found.end(), found[1]
        closing = f"</{name}>"
        end = -1 if name in unclosed else text.find(closing, position)
        if end < 0:
            unclosed.add(name)
        else:
            yield name, text[position:end]
            position = end + len(closing)


def last_number(text: str) -> str | None:
    """Return the last decimal number in the text, without thousands separators; None if there is none."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def marked_number(text: str) -> Decimal | None:
    """Return the last number in the text, after the last #### if the text has one.

    Decimal treats 72 and 72.0 as equal and parses in linear time; int() is quadratic.
    """
    found = last_number(text.rpartition("####")[2])
    return None if found is None else Decimal(found)
