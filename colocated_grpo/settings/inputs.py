"""Checks what a config refers to: model, data files, user code. Runs before any process or device is started."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from colocated_grpo.settings.adapter_files import CONFIG_FILE, WEIGHTS_FILE, with_adapter_settings
from colocated_grpo.settings.atropos import AtroposSourceConfig
from colocated_grpo.settings.base import NamedObject
from colocated_grpo.settings.code_names import check_code_name, check_program
from colocated_grpo.settings.config_json import (
    first_difference,
    longest_sequence,
    original_positions,
    read_config_json,
    shape_of,
)
from colocated_grpo.settings.context_rules import check_context
from colocated_grpo.settings.errors import ConfigError, dotted
from colocated_grpo.settings.hub import check_hub
from colocated_grpo.settings.layers import layers_text, out_of_range
from colocated_grpo.settings.lora import DEFAULT_INIT
from colocated_grpo.settings.model_support import check_has_experts, check_trains
from colocated_grpo.settings.schema import Config, ModelConfig
from colocated_grpo.settings.sources import (
    EVAL_DATASETS,
    TRAIN_DATASET,
    AgentSourceConfig,
    DatasetSourceConfig,
    EnvironmentConfig,
    RowsSourceConfig,
    prompt_functions,
)
from colocated_grpo.settings.text_parts import attention_heads, text_part
from colocated_grpo.settings.turns import TurnsSourceConfig

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Suffixes of dataset files. The readers are in `environments.rows.readers`, which config may not import."""


def check_inputs(config: Config) -> tuple[Config, list[str]]:
    """Return the config adapted to its model, and notes. Raises ConfigError where a file or name is missing, and
    for a model that does not train.

    Reads the model's config.json, from the Hub if the model is neither a local folder nor cached.
    """
    missing = [line for key, source in _sources(config) for line in _check_source(key, source)]
    missing += _check_answers(config)
    missing += _check_chat_template(config.model.chat_template)
    missing += _check_adapter(config)
    missing += _check_key("engine.api_key_variable", config.engine.api_key_variable)
    missing += _check_packages(config)
    missing += check_hub(config.hub)
    if missing:
        raise ConfigError(*missing)
    config = with_adapter_settings(config)
    model = read_config_json(config.model)
    check_trains(model, f"model.name={config.model.name!r}")
    if config.policy.routing_replay:
        check_has_experts(model, "policy.routing_replay=true")
    if config.policy.load_balancing:
        check_has_experts(model, f"policy.load_balancing={config.policy.load_balancing:g}")
    check_context(model, config.policy.context_parallel)
    if outside := list(_check_layers(config, model)):
        raise ConfigError(*outside)
    for index, source in enumerate(config.environments):
        if isinstance(source, TurnsSourceConfig) and source.opponent is not None:
            opponent = config.model_of(source.opponent)
            _check_opponent(f"environments.{index}.opponent", opponent, config, model)
    return _fit_engine(config, model)


def is_inline(chat_template: str) -> bool:
    """Return True if `model.chat_template` is Jinja text, which contains a brace; else it names a file."""
    return "{" in chat_template


def _check_chat_template(template: str | None) -> Iterator[str]:
    if template is not None and not is_inline(template) and not Path(template).is_file():
        yield f"model.chat_template={template!r}: no such file, and not Jinja text (no tag in it)"


def _check_adapter(config: Config) -> Iterator[str]:
    """Yield a line if policy.lora.init names no adapter in PEFT's format. Its contents are checked when it is read."""
    if config.policy.lora is None or config.policy.lora.init == DEFAULT_INIT:
        return
    key, folder = f"policy.lora.init={config.policy.lora.init!r}", Path(config.policy.lora.init)
    if not folder.is_dir():
        yield f"{key}: no such folder; write default or the folder of a PEFT adapter (download one of the Hub first)"
        return
    if not (folder / CONFIG_FILE).is_file():
        yield f"{key}: no {CONFIG_FILE} in this folder; expected an adapter saved by PEFT"
    elif not (folder / WEIGHTS_FILE).is_file():
        if (folder / "adapter_model.bin").is_file():
            yield f"{key}: reading adapter_model.bin can run code; load it in PEFT and save it as {WEIGHTS_FILE}"
        else:
            yield f"{key}: no {WEIGHTS_FILE} in this folder; expected an adapter saved by PEFT"


def _check_layers(config: Config, model: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that names a block that the model does not have."""
    text = text_part(model)
    blocks = text.get("num_hidden_layers") or text.get("n_layer")
    lora = config.policy.lora
    settings = (
        ("policy.train_layers", config.policy.train_layers),
        ("policy.lora.layers", None if lora is None else lora.layers),
    )
    for key, indices in settings:
        if indices and blocks and (rule := out_of_range(indices, blocks)):
            yield f"{key}={layers_text(indices)}: {rule} in {config.model.name}"


def _check_opponent(section: str, opponent: ModelConfig, config: Config, policy: Mapping[str, Any]) -> None:
    """Raise ConfigError where the opponent's shape differs from the policy's. Both use the same engine."""
    if opponent == config.model:
        return
    ours, theirs = shape_of(policy), shape_of(read_config_json(opponent, section))
    if (key := first_difference(ours, theirs)) is not None:
        raise ConfigError(
            f"{section}.name={opponent.name!r}: {key} is {theirs[key]}, but {ours[key]} in {config.model.name}; "
            "the opponent must have the shape of the policy"
        )


def _fit_engine(config: Config, model: Mapping[str, Any]) -> tuple[Config, list[str]]:
    text = text_part(model)
    heads, size = attention_heads(text), config.engine.tensor_parallel_size
    if heads and heads % size:
        raise ConfigError(
            f"engine.tensor_parallel_size={size}: must divide the {heads} attention heads of {config.model.name}"
        )
    positions = longest_sequence(text)
    if positions is None:
        return config, []
    if (limit := original_positions(text)) is not None and limit < config.max_sequence_tokens:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_completion_tokens={config.max_sequence_tokens}: must be at most "
            f"{limit}, as transformers and vLLM apply the longrope scaling of {config.model.name} to different tokens"
        )
    if positions < config.max_sequence_tokens:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_completion_tokens={config.max_sequence_tokens}: must be at most "
            f"{positions}, the positions in the config.json of {config.model.name}"
        )
    wanted = config.engine.max_model_len
    if wanted is None or wanted <= positions:
        return config, []
    engine = config.engine.model_copy(update={"max_model_len": positions})
    note = f"engine.max_model_len={wanted}: {config.model.name} has {positions} positions; using {positions}"
    return config.model_copy(update={"engine": engine}), [note]


def _check_key(setting: str, variable: str | None) -> Iterator[str]:
    if variable is not None and not os.environ.get(variable):
        yield f"{setting}={variable!r}: this environment variable is not set; export it"


def _check_packages(config: Config) -> Iterator[str]:
    if config.policy.optimizer.type == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        yield "policy.optimizer.type='adamw_8bit': needs bitsandbytes, which is not installed; pip install bitsandbytes"
    for name in config.tracking.trackers:
        if importlib.util.find_spec(name) is None:
            yield f"tracking.trackers={name!r}: this package is not installed; pip install {name.replace('_', '-')}"


def _sources(config: Config) -> Iterator[tuple[str, EnvironmentConfig]]:
    """Yield every source of prompts with its key."""
    for index, source in enumerate(config.environments):
        yield f"environments.{index}", source
    for index, entry in enumerate(config.evaluation.sets):
        yield f"evaluation.sets.{index}.source", entry.source


def _check_answers(config: Config) -> Iterator[str]:
    for index, entry in enumerate(config.evaluation.sets):
        if entry.answer is not None:
            yield from check_code_name(f"evaluation.sets.{index}.answer", entry.answer)


def _check_source(key: str, source: EnvironmentConfig) -> Iterator[str]:
    if isinstance(source, AtroposSourceConfig):
        yield from _check_key(f"{key}.api_key_variable", source.api_key_variable)
        yield from _check_key(f"{key}.server.api_key_variable", source.server.api_key_variable)
        return
    for path, name in prompt_functions(source):
        yield from check_code_name(f"{key}.{dotted(path)}", name)
    if not isinstance(source, RowsSourceConfig):
        if not isinstance(source, NamedObject) or source.given is None:
            yield from check_code_name(f"{key}.name", source.name)
        return
    if isinstance(source, AgentSourceConfig):
        yield from check_program(f"{key}.program", source.program)
    if isinstance(source, DatasetSourceConfig):
        for number, reward in enumerate(source.rewards):
            if reward.given is None:
                yield from _check_reward(f"{key}.rewards.{number}", reward.name)
    if source.given is not None:
        return
    if source.name == TRAIN_DATASET or source.name.startswith(f"{EVAL_DATASETS}["):
        yield f"{key}.name={source.name!r}: rows of the program that began the run; continue it with that program"
        return
    there, readable = Path(source.name).is_file(), source.name.lower().endswith(DATA_SUFFIXES)
    if readable and not there:
        yield f"{key}.name={source.name!r}: no such file (in {os.getcwd()}, or beside the config)"
    if there and not readable:
        yield f"{key}.name={source.name!r}: unsupported format; supported: {', '.join(DATA_SUFFIXES)}"


def _check_reward(key: str, name: str) -> Iterator[str]:
    module, dot, function = name.rpartition(".")
    if dot and ":" not in name:  # a dotted Python name: built-in rewards have no dot
        rule = "names no function; write file.py:function" if function == "py" else f"write {module}:{function}"
        yield f"{key}={name!r}: {rule}"
    yield from check_code_name(key, name)
