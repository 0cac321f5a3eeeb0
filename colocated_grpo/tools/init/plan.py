"""The choices for a config: data columns, reward, lengths, batch and memory settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from colocated_grpo.environments.base import Item
from colocated_grpo.environments.rewards.functions import check_reward_name
from colocated_grpo.environments.rows.files import READERS
from colocated_grpo.environments.templates import with_system_prompt
from colocated_grpo.settings.code_names import check_code_name
from colocated_grpo.settings.config_json import longest_sequence, read_config_json
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.model_sizes import Sizes, sizes_of
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.text_parts import attention_heads, text_part
from colocated_grpo.tools.doctor.footprint import Placement
from colocated_grpo.tools.init.columns import Reward, builtin_reward, prompt_column
from colocated_grpo.tools.init.sizes import Batch, Lengths, Memory, batch_of, fit_memory, lengths_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLED_ROWS = 2000
"""Rows whose tokens are counted."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    model: str
    data: str
    rows: int
    column: str
    reward: Reward
    lengths: Lengths
    batch: Batch
    sizes: Sizes | None
    """None, and no memory settings, if config.json does not state the sizes of the model."""
    memory: Memory | None
    place: Placement


def make_plan(data: Path, model_name: str, reward_name: str | None, place: Placement) -> Plan:
    """Raises ConfigError where a file or a column is missing, or if the model does not fit."""
    from colocated_grpo.policy.model_files import read_tokenizer

    rows = _read(data)
    column = prompt_column(rows)
    reward = builtin_reward(rows, column) if reward_name is None else _named_reward(reward_name)
    source = {"type": "dataset", "name": str(data), "rewards": [reward.name]}
    config = Config.model_validate({"model": {"name": model_name}, "environments": [source]})
    model = read_config_json(config.model)
    text = text_part(model)
    tokenizer = read_tokenizer(config.model)
    if tokenizer.chat_template is None:
        reward = Reward(name=reward.name, why=reward.why, rename=reward.rename)
    prompts, answers = _count_tokens(rows, column, reward, tokenizer)
    lengths = lengths_of(prompts, answers, longest_sequence(text), place.on_gpu)
    limits = {"max_prompt_tokens": lengths.prompt, "max_completion_tokens": lengths.completion}
    config = Config.model_validate(config.model_dump() | {"rollout": config.rollout.model_dump() | limits})
    sizes, memory = sizes_of(model), None
    if sizes is not None:
        heads = attention_heads(text) or 1
        memory = fit_memory(config, sizes, heads, place, psutil.virtual_memory().available)
    return Plan(
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
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        raise ConfigError(f"{str(file)!r}: must be a file of one of these types: {', '.join(READERS)}")
    if not file.is_file():
        raise ConfigError(f"{str(file)!r}: no such file")
    try:
        rows = reader(file)
    except ValueError as error:
        raise ConfigError(f"{str(file)!r}: {error}") from None
    if len(rows) < 2:
        raise ConfigError(f"{str(file)!r}: has {len(rows)} rows; at least 2 are needed")
    return rows


def _named_reward(name: str) -> Reward:
    check_reward_name(name, "--reward")
    for line in check_code_name("--reward", name):
        raise ConfigError(line)
    return Reward(name=name, why="named with --reward")


def _count_tokens(
    rows: Sequence[Item], column: str, reward: Reward, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]]:
    """Return the tokens of prompts, as the model reads them, and of answers."""
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
