"""Text of the question to a judge, and the score in its answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PLACE = re.compile(r"\{\{|\}\}|\{(\w+)\}")
DEFAULT_PARSE = r"(?i)\bscore\b\W{0,9}(-?\d+(?:\.\d+)?)"
"""Matches `Score: 7`, `**Score**: 0.5` and `{"score": 1}`."""
SHOWN_CHARACTERS = 80


def places(template: str) -> set[str]:
    """Return the names in {braces} of a template."""
    return {name for name in PLACE.findall(template) if name}


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Replace each {name} by its value. {{ and }} become single braces; other braces stay as they are."""
    return PLACE.sub(lambda found: str(values[found[1]]) if found[1] else found[0][0], template)


def last_score(pattern: str, text: str) -> float:
    """Return the number in the last match's group. Raises ValueError if there is none."""
    found = re.findall(pattern, text)
    if not found:
        shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
        raise ValueError(f"no score in the judge's answer {shown!r}")
    return float(found[-1])


def plain_text(prompt: str | list[dict[str, Any]]) -> str:
    """Return a prompt as text: the content of a single message, else `role: content` for each message."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
