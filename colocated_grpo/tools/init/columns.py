"""Columns of a data file: which one is the prompt, which one the answer, and which built-in reward compares it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from colocated_grpo.environments.base import Item
from colocated_grpo.environments.rewards.answers import NUMBER
from colocated_grpo.settings.errors import ConfigError

PROMPTS = ("prompt", "question", "messages", "problem", "instruction", "query", "input")
ANSWERS = ("answer", "solution", "ground_truth", "final_answer", "target", "gold", "label", "expected", "output")
TOOL_CALLS = "tool_calls"
MAX_EXACT_CHARACTERS = 60
"""Longest answers that exact_match is chosen for. A model hardly repeats a longer text literally."""
BY_NUMBER = "Reason step by step, then give the final number after ####."
BY_FORMULA = r"Reason step by step, then give the final answer in \boxed{}."
BY_TAG = "Reason step by step, then give the final answer between <answer> and </answer>."


@dataclass(frozen=True, kw_only=True)
class Reward:
    name: str
    why: str
    system_prompt: str | None = None
    """Instruction to write the answer in the form that the reward reads."""
    rename: tuple[str, str] | None = None
    """Column of the data, and the name under which the reward reads it."""


def prompt_column(rows: Sequence[Item]) -> str:
    """Return the column of prompts. Raises ConfigError if there is none, or if its conversations include the answer."""
    column = _first_of(PROMPTS, rows)
    if column is None:
        raise ConfigError(f"data: no column of prompts ({', '.join(PROMPTS)}); it has: {_names(rows)}; rename one")
    value = rows[0][column]
    if isinstance(value, list) and value and isinstance(value[-1], dict) and value[-1].get("role") == "assistant":
        raise ConfigError(
            f"data: {column!r} of row 0 ends with the assistant's message; move it into a column 'answer': "
            "the model samples this message"
        )
    return column


def builtin_reward(rows: Sequence[Item], prompt: str) -> Reward:
    """Return the built-in reward that compares completions with the data's answers. Raises ConfigError if none does."""
    if TOOL_CALLS in rows[0]:
        return Reward(name="tool_call", why=f"compares the calls of a completion with the column {TOOL_CALLS}")
    column = _first_of([name for name in ANSWERS if name != prompt], rows)
    if column is None:
        raise ConfigError(
            f"data: no column of answers ({', '.join(ANSWERS)}); it has: {_names(rows)}; rename one, or name your own "
            "function with --reward my_rewards.py:function"
        )
    answers = [str(row.get(column)).strip() for row in rows]
    rename = None if column == ANSWERS[0] else (column, ANSWERS[0])
    if all("####" in answer for answer in answers):
        why = f"compares the last number with the one after #### in {column!r}"
        return Reward(name="gsm8k", why=why, system_prompt=BY_NUMBER, rename=rename)
    if all(NUMBER.fullmatch(answer) for answer in answers):
        why = f"compares the last number with {column!r}, which has only numbers"
        return Reward(name="gsm8k", why=why, system_prompt=BY_NUMBER, rename=rename)
    if all(_is_formula(answer) for answer in answers) and importlib.util.find_spec("math_verify") is not None:
        why = f"compares formulas: all of {column!r} are numbers or in LaTeX"
        return Reward(name="math_verify", why=why, system_prompt=BY_FORMULA, rename=rename)
    if max(map(len, answers)) <= MAX_EXACT_CHARACTERS:
        why = f"compares the final answer with {column!r}, which has at most {MAX_EXACT_CHARACTERS} characters"
        return Reward(name="exact_match", why=why, system_prompt=BY_TAG, rename=rename)
    raise ConfigError(
        f"data: answers in {column!r} have up to {max(map(len, answers))} characters, and no built-in reward compares "
        "such texts; name your own function with --reward my_rewards.py:function"
    )


def _is_formula(answer: str) -> bool:
    return bool(NUMBER.fullmatch(answer)) or any(sign in answer for sign in "\\$^")


def _first_of(names: Sequence[str], rows: Sequence[Item]) -> str | None:
    """Return the column whose lower-case name comes first in `names` and which no row lacks."""
    by_lower: dict[str, Any] = {str(column).lower(): column for column in rows[0]}
    complete = (by_lower[name] for name in names if name in by_lower)
    return next((column for column in complete if all(row.get(column) is not None for row in rows)), None)


def _names(rows: Sequence[Item]) -> str:
    return ", ".join(map(str, rows[0])) or "none"
