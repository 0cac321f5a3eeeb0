"""Functions from a completion's text to the answer that a majority vote compares."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable
from decimal import Decimal
from typing import Any

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.rewards import answers
from colocated_grpo.environments.user_code.loading import load_object, one_line

logger = logging.getLogger(__name__)

Answer = Callable[[str], Hashable | None]
BOX = "\\boxed{"
LAYOUT = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])|[$\s]")
"""TeX that changes how an answer looks and not what it is."""


def final_answer(text: str) -> str | None:
    """Return the content of the last <answer>...</answer>, else the text without its thoughts; None if it is empty."""
    return answers.final_answer(text) or None


def last_number(text: str) -> Decimal | None:
    """Return the last number, after the last #### if the text has one."""
    found = answers.last_number(text.rpartition("####")[2])
    return None if found is None else Decimal(found)


def boxed(text: str) -> Hashable | None:
    r"""Return the content of the last \boxed{...} without TeX's layout, else the last number."""
    start = text.rfind(BOX)
    if start < 0:
        return last_number(text)
    inside = _balanced(text, start + len(BOX))
    if inside is None:
        return None
    plain = LAYOUT.sub("", inside).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    number = _as_number(plain)
    return (plain or None) if number is None else number


def _balanced(text: str, start: int) -> str | None:
    """Return the text from `start` to the brace that closes it; None if none does."""
    depth = 1
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[start:position]
    return None


def _as_number(text: str) -> Decimal | None:
    """Return the number that the whole text is; None if it is none. 1.50 and 1.5 are the same answer."""
    found = answers.NUMBER.fullmatch(text)
    return Decimal(text.replace(",", "")) if found else None


BUILT_IN: dict[str, Answer] = {"final_answer": final_answer, "last_number": last_number, "boxed": boxed}


def answer_function(name: str, key: str) -> Answer:
    """Return the function of this name, built in or of the user. Raises EnvironmentSetupError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    function = load_object(name, key)
    if not callable(function):
        raise EnvironmentSetupError(f"{key}: {name!r} is a {type(function).__name__}, not a function")

    def answer(text: str) -> Any:
        try:
            found = function(text)
            hash(found)
        except Exception as error:  # user code: one completion without an answer does not end a run
            logger.warning("%s=%r: %s", key, name, one_line(error))
            return None
        return found

    return answer
