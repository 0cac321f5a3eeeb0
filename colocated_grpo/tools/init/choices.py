"""Choices for a config that follow from the data: columns, reward, lengths, and the sizes of the run (`sizes`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from colocated_grpo.environments.base import Item
from colocated_grpo.environments.rewards.answers import NUMBER
from colocated_grpo.environments.rewards.functions import load_reward
from colocated_grpo.environments.rows.readers import READERS
from colocated_grpo.environments.templates import with_system_prompt
from colocated_grpo.errors import ConfigError
from colocated_grpo.settings.config_json import attention_heads, longest_sequence, read_config_json, text_part
from colocated_grpo.settings.model_sizes import Sizes, sizes_of
from colocated_grpo.settings.run_sizes import Placement
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import RewardConfig
from colocated_grpo.tools.init.sizes import BatchSizes, Lengths, Memory, batch_of, fit_memory, lengths_of
from colocated_grpo.types import ANSWER_COLUMNS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS = ("prompt", "question", "messages", "problem", "instruction", "query", "input")
TOOL_CALLS = "tool_calls"
MAX_EXACT_CHARACTERS = 60
"""Longest answers for which exact_match is chosen. A model rarely repeats a longer text literally."""
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
    """Return the column of prompts. Raises ConfigError without such a column, or if prompts include the answer."""
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
    """Return the built-in reward that compares completions with the data's answers. Raises ConfigError if none can."""
    if TOOL_CALLS in rows[0]:
        return Reward(name="tool_call", why=f"compares the calls of a completion with the column {TOOL_CALLS}")
    column = _first_of([name for name in ANSWER_COLUMNS if name != prompt], rows)
    if column is None:
        raise ConfigError(
            f"data: no column of answers ({', '.join(ANSWER_COLUMNS)}); it has: {_names(rows)}; rename one, or name "
            "your own function with --reward my_rewards.py:function"
        )
    answers = [str(row.get(column)).strip() for row in rows]
    rename = None if column == ANSWER_COLUMNS[0] else (column, ANSWER_COLUMNS[0])
    only_numbers = all(NUMBER.fullmatch(answer) for answer in answers)
    only_formulas = all(NUMBER.fullmatch(answer) or any(sign in answer for sign in "\\$^") for answer in answers)
    if all("####" in answer for answer in answers):
        name, prompt, why = "gsm8k", BY_NUMBER, f"compares the last number with the one after #### in {column!r}"
    elif only_numbers:
        name, prompt, why = "gsm8k", BY_NUMBER, f"compares the last number with {column!r}, which has only numbers"
    elif only_formulas and importlib.util.find_spec("math_verify") is not None:
        name, prompt = "math_verify", BY_FORMULA
        why = f"compares formulas: all of {column!r} are numbers or in LaTeX"
    elif max(map(len, answers)) <= MAX_EXACT_CHARACTERS:
        name, prompt = "exact_match", BY_TAG
        why = f"compares the final answer with {column!r}, which has at most {MAX_EXACT_CHARACTERS} characters"
    else:
        raise ConfigError(
            f"data: answers in {column!r} have up to {max(map(len, answers))} characters, and no built-in reward "
            "compares such texts; name your own function with --reward my_rewards.py:function"
        )
    return Reward(name=name, why=why, system_prompt=prompt, rename=rename)


def _first_of(names: Sequence[str], rows: Sequence[Item]) -> str | None:
    """Return the column whose lower-case name comes first in `names` and which no row lacks."""
    by_lower: dict[str, str] = {str(column).lower(): column for column in rows[0]}
    complete = (by_lower[name] for name in names if name in by_lower)
    return next((column for column in complete if all(row.get(column) is not None for row in rows)), None)


def _names(rows: Sequence[Item]) -> str:
    return ", ".join(map(str, rows[0])) or "none"


SAMPLED_ROWS = 2000
"""Rows whose tokens are counted."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    model: str
    data: str
    rows: int
    column: str
    reward: Reward
    lengths: Lengths
    batch: BatchSizes
    sizes: Sizes | None
    """None if config.json does not state the sizes of the model. `memory` is then None, too."""
    memory: Memory | None
    place: Placement


def make_plan(data: Path, model_name: str, reward_name: str | None, place: Placement) -> Choices:
    """Make all choices. Raises ConfigError if a file or a column is missing, or if the model does not fit."""
    from colocated_grpo.policy.model_files import read_tokenizer

    rows = _read(data)
    column = prompt_column(rows)
    if reward_name is None:
        reward = builtin_reward(rows, column)
    else:
        load_reward(reward_name, RewardConfig(name=reward_name), "--reward")
        reward = Reward(name=reward_name, why="named with --reward")
    source = {"type": "dataset", "name": str(data), "rewards": [reward.name]}
    config = Config.model_validate({"model": {"name": model_name}, "environments": [source]})
    model = read_config_json(config.model)
    text = text_part(model)
    tokenizer = read_tokenizer(config.model)
    if tokenizer.chat_template is None:
        reward = replace(reward, system_prompt=None)
    prompts, answers = _count_tokens(rows, column, reward, tokenizer)
    lengths = lengths_of(prompts, answers, longest_sequence(text), place.on_gpu)
    limits = {"max_prompt_tokens": lengths.prompt, "max_completion_tokens": lengths.completion}
    config = Config.model_validate(config.model_dump() | {"rollout": config.rollout.model_dump() | limits})
    sizes, memory = sizes_of(model), None
    if sizes is not None:
        memory = fit_memory(config, sizes, attention_heads(text) or 1, place, psutil.virtual_memory().available)
    return Choices(
        model=model_name,
        data=str(data),
        rows=len(rows),
        column=column,
        reward=reward,
        lengths=lengths,
        batch=batch_of(len(rows), place.ranks if place.on_gpu else 0),
        sizes=sizes,
        memory=memory,
        place=place,
    )


def _read(file: Path) -> list[Item]:
    reader, name = READERS.get(file.suffix.lower()), str(file)
    if reader is None:
        raise ConfigError(f"{name!r}: must be a file of one of these types: {', '.join(READERS)}")
    if not file.is_file():
        raise ConfigError(f"{name!r}: no such file")
    try:
        rows = reader(file)
    except ValueError as error:
        raise ConfigError(f"{name!r}: {error}") from None
    if len(rows) < 2:
        raise ConfigError(f"{name!r}: number of rows: {len(rows)}; at least 2 are needed")
    return rows


def _count_tokens(
    rows: Sequence[Item], column: str, reward: Reward, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]]:
    """Return the numbers of tokens of the prompts, as the model reads them, and of the answers."""
    from colocated_grpo.environments.prompts import PromptEncoder

    encoder = PromptEncoder(tokenizer, max_prompt_tokens=1 << 20)
    sampled = rows[:: max(1, len(rows) // SAMPLED_ROWS)]
    prompts = []
    for row in sampled:
        prompt = row[column]
        if reward.system_prompt is not None and isinstance(prompt, str | list):
            prompt = with_system_prompt(prompt, reward.system_prompt)
        encoded = encoder.encode({**row, "prompt": prompt}, index=0, source=column)
        prompts.append(0 if encoded is None else len(encoded.token_ids))
    answer = "answer" if reward.rename is None else reward.rename[0]
    return prompts, [len(tokenizer.encode(str(row[answer]))) for row in sampled if answer in row]
