"""Choices for a config: columns and reward from the data; lengths, batch and memory settings by arithmetic."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from colocated_grpo.environments.base import Item
from colocated_grpo.environments.prompts import PromptEncoder, with_system_prompt
from colocated_grpo.environments.rewards.builtin import NUMBER
from colocated_grpo.environments.rewards.functions import load_reward
from colocated_grpo.environments.rows import dataset, readers
from colocated_grpo.errors import ConfigError
from colocated_grpo.settings.config_json import attention_heads, longest_sequence, read_config_json, text_part
from colocated_grpo.settings.model_sizes import Sizes, sizes_of
from colocated_grpo.settings.run_sizes import FULL, Placement, RankMemory, RunSizes, fits, gib, memory_fix
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import RewardConfig
from colocated_grpo.settings.training import LEARNING_RATE, PolicyConfig, rate_of_small_model
from colocated_grpo.types import ANSWER_COLUMNS, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_STEP = 32
"""Prompt limits are multiples of this number."""
GPU_COMPLETION, CPU_COMPLETION = 1024, 128
PASSES, MAX_STEPS, MIN_STEPS = 3, 200, 20


@dataclass(frozen=True)
class Setting:
    key: str
    value: Any
    why: str = ""
    """Comment above the setting."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Settings that make the run fit."""

    changes: JsonObject
    """Sections of the config: {"policy": {"offload_optimizer": True}}."""
    why: str
    need: RankMemory
    sequences: int
    """Sequences of full length in the KV cache at a time."""


def lengths_of(
    prompts: Sequence[int], answers: Sequence[int], positions: int | None, on_gpu: bool
) -> tuple[Setting, Setting]:
    """Return the maximum prompt and completion, from numbers of tokens and the model's positions (None: unknown)."""
    limit = (positions or max(prompts) * 4) // 2
    prompt = min(_round_up(max(prompts)), limit)
    dropped = sum(length > prompt for length in prompts)
    prompt_why = f"the longest of {len(prompts):,} prompts has {max(prompts)} tokens"
    if dropped:
        prompt_why += f"; {dropped} are longer than half of the model's {positions} positions and are dropped"
    wanted = GPU_COMPLETION if on_gpu else CPU_COMPLETION
    answer = _round_up(2 * max(answers, default=0))
    completion = max(wanted, answer)
    completion_why = "room to reason; raise it if the metric `truncated` stays above 0.1"
    if answer > wanted:
        completion_why = f"twice the longest answer ({max(answers)} tokens)"
    if positions is not None and completion > positions - prompt:
        completion = positions - prompt
        completion_why = f"what the model's {positions} positions leave"
    return (
        Setting("max_prompt_tokens", prompt, prompt_why),
        Setting("max_completion_tokens", completion, completion_why),
    )


def batch_of(rows: int, gpus: int) -> tuple[Setting, Setting, Setting]:
    """Return prompts a step, completions a prompt, and steps."""
    held_out = dataset.num_held_out(None, rows)
    train = rows - held_out
    wanted, group = (max(32, 16 * gpus), 16) if gpus else (8, 8)
    prompts = max(1, gpus, min(wanted, train))
    why = f"{prompts * group} completions a step"
    why += f", {prompts * group // gpus} on each GPU" if gpus > 1 else ""
    steps = max(MIN_STEPS, min(MAX_STEPS, ceil(PASSES * train / prompts)))
    passes = steps * prompts / train
    steps_why = f"{passes:.3g} passes over {train:,} rows; {held_out or 'none'} held out for evaluation"
    return (
        Setting("prompts_per_step", prompts, why),
        Setting("group_size", group, "completions of a prompt, whose rewards are compared with each other"),
        Setting("training_steps", steps, steps_why),
    )


def learning_rate(sizes: Sizes | None, memory: Memory | None) -> Setting:
    if memory is not None and memory.changes.get("policy", {}).get("lora") is not None:
        return Setting("lr", LEARNING_RATE, "adapters need about ten times the rate of full training")
    if sizes is not None and (small := rate_of_small_model(sizes.total)) is not None:
        return Setting("lr", *small)
    return Setting("lr", PolicyConfig().lr, "suits pretrained models; watch `kl` and `entropy` before you raise it")


def fit_memory(config: Config, sizes: Sizes, heads: int, place: Placement, host_bytes: int) -> Memory:
    """Return the first of `_candidates` that fits. Raises ConfigError. host_bytes: free memory of the machine."""
    host = host_bytes // place.ranks
    device = place.device_bytes if place.on_gpu else host
    parallel = (1, 2, 4, 8) if place.on_gpu else (1,)
    possible = [size for size in parallel if place.ranks % size == 0 and heads % size == 0]
    for changes, why in _candidates(place.ranks, place.on_gpu, possible):
        tree = config.model_dump()
        for section, values in changes.items():
            tree[section] = tree[section] | values if isinstance(values, dict) else values
        run = RunSizes(Config.model_validate(tree), sizes, place)
        if fits(run, host, FULL):
            need = run.footprint()
            sequences = 1 + max(0, device - need.generating) // run.kv_bytes_per_sequence()
            return Memory(changes=changes, why=why, need=need, sequences=sequences)
    what = f"{place.ranks} GPUs of {gib(device)}" if place.on_gpu else f"{gib(device)} of memory"
    rule = f"does not fit on {what} with any setting; it would with {memory_fix(RunSizes(config, sizes, place), host)}"
    raise ConfigError(f"model.name={config.model.name!r}: {rule}")


def _candidates(ranks: int, on_gpu: bool, tensor_parallel_sizes: Sequence[int]) -> Iterator[tuple[JsonObject, str]]:
    """Yield settings with their explanations, in order of increasing cost."""
    kinds: list[tuple[JsonObject, str]] = [({}, "all weights are trained on the device")]
    if on_gpu:
        adapter: JsonObject = {"policy": {"lora": {}}} | ({"weights": "shared"} if ranks == 1 else {})
        kinds += [
            ({"policy": {"offload_optimizer": True}}, "optimizer state leaves the GPU while the engine generates"),
            (adapter, "all weights with their optimizer state do not fit, an adapter (LoRA) does"),
            ({"policy": {"cpu_offload": True}}, "weights and optimizer state are in host memory; slower"),
        ]
    for changes, why in kinds:
        for size in tensor_parallel_sizes:
            parallel = {"engine": {"tensor_parallel_size": size}} if size > 1 else {}
            suffix = f"; an engine of {size} GPUs, as one cannot hold its weights" if size > 1 else ""
            yield changes | parallel, why + suffix


def _round_up(tokens: int) -> int:
    return ceil(tokens / PROMPT_STEP) * PROMPT_STEP


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
    if (column := _first_of(PROMPTS, rows)) is None:
        rule = f"no column of prompts with a value in every row ({', '.join(PROMPTS)})"
        raise ConfigError(f"data: {rule}; it has: {_names(rows)}; rename one")
    value = rows[0][column]
    if isinstance(value, list) and value and isinstance(value[-1], dict) and value[-1].get("role") == "assistant":
        advice = "move it into a column 'answer': the model samples this message"
        raise ConfigError(f"data: {column!r} of row 0 ends with the assistant's message; {advice}")
    return column


def builtin_reward(rows: Sequence[Item], prompt: str) -> Reward:
    """Return the built-in reward that compares completions with the data's answers. Raises ConfigError if none can."""
    if TOOL_CALLS in rows[0]:
        return Reward(name="tool_call", why=f"compares the calls of a completion with the column {TOOL_CALLS}")
    if (column := _first_of([name for name in ANSWER_COLUMNS if name != prompt], rows)) is None:
        rule = f"no column of answers with a value in every row ({', '.join(ANSWER_COLUMNS)})"
        advice = "rename one, or name your own function with --reward my_rewards.py:function"
        raise ConfigError(f"data: {rule}; it has: {_names(rows)}; {advice}")
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
    elif (longest := max(map(len, answers))) <= MAX_EXACT_CHARACTERS:
        name, prompt = "exact_match", BY_TAG
        why = f"compares the final answer with {column!r}, which has at most {MAX_EXACT_CHARACTERS} characters"
    else:
        rule = f"answers in {column!r} have up to {longest} characters, and no built-in reward compares such texts"
        raise ConfigError(f"data: {rule}; name your own function with --reward my_rewards.py:function")
    return Reward(name=name, why=why, system_prompt=prompt, rename=rename)


def _first_of(names: Sequence[str], rows: Sequence[Item]) -> str | None:
    """Return the column whose lower-case name comes first in `names`, which no row lacks, and which is not empty."""
    by_lower: dict[str, str] = {str(column).lower(): column for column in rows[0]}
    for column in (by_lower[name] for name in names if name in by_lower):
        values = [row.get(column) for row in rows]
        if None not in values and any(value not in ("", []) for value in values):
            return column
    return None


def _names(rows: Sequence[Item]) -> str:
    return ", ".join(map(str, rows[0])) or "none"


SAMPLED_ROWS = 2000


@dataclass(frozen=True, kw_only=True)
class Choices:
    rows: int
    column: str
    reward: Reward
    rollout: Sequence[Setting]
    steps: Setting
    sizes: Sizes | None
    """None if config.json does not state the sizes of the model. `memory` is then None, too."""
    memory: Memory | None


def make_plan(data: Path, model_name: str, reward_name: str | None, place: Placement) -> Choices:
    """Make all choices. Raises ConfigError if a file or a column is missing, or if the model does not fit."""
    from colocated_grpo.policy.model_files import read_tokenizer

    if len(rows := readers.read_file(data)) < 2:
        raise ConfigError(f"{str(data)!r}: number of rows: {len(rows)}; at least 2 are needed")
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
        if any(isinstance(row[column], list) for row in rows):
            rule = f"the messages in {column!r} need a chat template, which this model lacks"
            raise ConfigError(f"--model={model_name}: {rule}; write prompts as text, or name another model")
    prompts, answers = _count_tokens(rows, column, reward, tokenizer)
    lengths = lengths_of(prompts, answers, longest_sequence(text), place.on_gpu)
    limits = {length.key: length.value for length in lengths}
    config = Config.model_validate(config.model_dump() | {"rollout": config.rollout.model_dump() | limits})
    sizes, memory = sizes_of(model), None
    if sizes is not None:
        memory = fit_memory(config, sizes, attention_heads(text) or 1, place, psutil.virtual_memory().available)
    *batch, steps = batch_of(len(rows), place.ranks if place.on_gpu else 0)
    rollout = [*batch, *lengths]
    return Choices(
        rows=len(rows), column=column, reward=reward, rollout=rollout, steps=steps, sizes=sizes, memory=memory
    )


def _count_tokens(
    rows: Sequence[Item], column: str, reward: Reward, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[int], list[int]]:
    """Return the numbers of tokens of the prompts, as the model reads them, and of the answers."""
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
