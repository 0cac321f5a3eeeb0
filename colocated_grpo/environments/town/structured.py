"""The legal replies of one turn as a regular expression, for engines that can sample within one."""

from __future__ import annotations

import re

from colocated_grpo.environments.town.legality import Form, Legal, Slot

LONGEST_THOUGHT = 400
_TEXT = "[A-Za-z0-9][A-Za-z0-9 ,.!?':;-]"
"""Characters of speech: what the parser would clean away, or read as a tag, cannot be written at all."""


def reply_pattern(legal: Legal, max_speech: int, max_thought: int = LONGEST_THOUGHT) -> str:
    """Matches well-formed legal replies only. Plain alternation, classes and bounded repeats: every engine has them."""
    actions = "|".join(_action(tag, slot, max_speech) for tag, slot in legal.items())
    return f"<think>[^<>]{{0,{max_thought}}}</think>({actions})"


def _action(tag: str, slot: Slot, max_speech: int) -> str:
    if slot.form is Form.EMPTY:
        return f"<{tag}/>"
    options = "|".join(re.escape(option) for option in slot.options)
    text = f"{_TEXT}{{0,{max_speech - 1}}}"
    inside = {Form.CHOICE: f"({options})", Form.TEXT: text, Form.ADDRESSED: f"({options}): {text}"}[slot.form]
    return f"<{tag}>{inside}</{tag}>"
