"""Checks what a config refers to: model, data files, user code, and the PEFT adapter that a run continues from.

Runs before any process or device is started.
"""

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from colocated_grpo.settings import config_json, model_sizes, model_support, schema, sources, training
from colocated_grpo.settings.base import DEFAULT_INIT, NamedObject
from colocated_grpo.settings.errors import ConfigError, dotted, raise_on
from colocated_grpo.settings.evaluation import EvaluationSetConfig
from colocated_grpo.settings.schema import Config
from colocated_grpo.types import JsonObject

_OF_PROGRAM = "of the program that began the run; continue it there: train(resume=RUN)"


def check_inputs(config: Config) -> tuple[Config, list[str]]:
    """Return the config adapted to its model, and notes. Raises ConfigError if an input is missing or unsupported."""
    template = config.model.chat_template
    missing = [
        *_check_sources(config.environments, config.evaluation.sets),
        *missing_adapter_files(config.policy.lora),
        *_check_key("engine.api_key_variable", config.engine.api_key_variable),
        *check_hub(config.hub),
    ]
    if template is not None and not is_inline(template) and not Path(template).is_file():
        missing.append(f"model.chat_template={template!r}: no such file, and not Jinja text (no tag in it)")
    if config.policy.optimizer.type == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        rule = "needs bitsandbytes, which is not installed; pip install bitsandbytes"
        missing.append(f"policy.optimizer.type='adamw_8bit': {rule}")
    raise_on(*missing)
    config = with_adapter_settings(config)
    model = config_json.read_config_json(config.model)
    model_support.check_trains(model, f"model.name={config.model.name!r}")
    if config.policy.routing_replay:
        model_support.check_has_experts(model, "policy.routing_replay=true")
    if config.policy.load_balancing:
        model_support.check_has_experts(model, f"policy.load_balancing={config.policy.load_balancing:g}")
    model_support.check_context(model, config.policy.context_parallel)
    raise_on(*_check_layers(config.policy, model, config.model.name))
    if (opponent := config.opponent_model) is not None and opponent != config.model:
        _check_opponent(opponent, model, config.model.name)
    text, name = config_json.text_part(model), config.model.name
    heads, size = config_json.attention_heads(text), config.engine.tensor_parallel_size
    if heads and heads % size:
        raise ConfigError(f"engine.tensor_parallel_size={size}: must divide the {heads} attention heads of {name}")
    positions = config_json.longest_sequence(text) or config_json.MAX_SIZE  # some files do not state it
    lowered, notes = _lowered_lengths(config.rollout, positions, name)
    sizes, is_default = model_sizes.sizes_of(text), "lr" not in config.policy.model_fields_set
    if is_default and sizes is not None and (small := training.rate_of_small_model(sizes.total)) is not None:
        notes.append(f"policy.lr={config.policy.lr:g} is the default; set {small[0]:g}: {small[1]}")
    config = config.with_values("rollout", **lowered)
    original = config_json.original_positions(text)
    longest = f"rollout.max_prompt_tokens + rollout.max_completion_tokens={config.max_sequence_tokens}: must be at most"
    if original is not None and original < config.max_sequence_tokens:
        why = f"as transformers and vLLM apply the longrope scaling of {name} to different tokens"
        raise ConfigError(f"{longest} {original}, {why}")
    if positions < config.max_sequence_tokens:
        raise ConfigError(f"{longest} {positions}, the positions in the config.json of {name}")
    if (wanted := config.engine.max_model_len) is not None and wanted > positions:
        notes.append(f"engine.max_model_len={wanted}: {name} has {positions} positions; using {positions}")
        config = config.with_values("engine", max_model_len=positions)
    if config.reference_model is not None:
        _check_reference(config.reference_model, config.policy.context_parallel, config.max_sequence_tokens)
    return config, notes


def is_inline(chat_template: str) -> bool:
    """Return True if `model.chat_template` is Jinja text. Text without a brace is a file's name, not Jinja text."""
    return "{" in chat_template


def _check_layers(policy: training.PolicyConfig, model: JsonObject, name: str) -> Iterator[str]:
    """Yield a line for each setting that contains the index of a block that the model does not have."""
    text = config_json.text_part(model)
    blocks = text.get("num_hidden_layers") or text.get("n_layer")
    adapted = None if policy.lora is None else policy.lora.layers
    for key, indices in (("policy.train_layers", policy.train_layers), ("policy.lora.layers", adapted)):
        if indices and blocks and (missing := [index for index in indices if index >= blocks]):
            rule = f"the model's blocks are 0-{blocks - 1}, so there is no block {missing[0]}"
            yield f"{key}={training.layers_text(indices)}: {rule} in {name}"


def _check_reference(reference: schema.ModelConfig, context_parallel: int, longest: int) -> None:
    """Raise ConfigError if another model than the policy's cannot score the run's sequences."""
    key = f"loss.kl.model={reference.name!r}"
    model = config_json.read_config_json(reference, "loss.kl.model")
    model_support.check_trains(model, key)
    model_support.check_context(model, context_parallel)
    if (positions := config_json.longest_sequence(config_json.text_part(model))) is not None and positions < longest:
        advice = "lower rollout.max_prompt_tokens or rollout.max_completion_tokens"
        raise ConfigError(f"{key}: it has {positions} positions, and a sequence up to {longest}; {advice}")


def _check_opponent(opponent: schema.ModelConfig, policy: JsonObject, name: str) -> None:
    """Raise ConfigError if the opponent's shape differs from the policy's shape. Both models use the same engine."""
    setting = "environments: opponent.name"
    ours, theirs = config_json.shape_of(policy), config_json.shape_of(config_json.read_config_json(opponent, setting))
    if (key := config_json.first_difference(ours, theirs)) is not None:
        rule = f"{key} is {theirs[key]}, but {ours[key]} in {name}; the opponent must have the shape of the policy"
        raise ConfigError(f"{setting}={opponent.name!r}: {rule}")


def _lowered_lengths(rollout: schema.RolloutConfig, positions: int, name: str) -> tuple[dict[str, int], list[str]]:
    """Return default lengths lowered to what a length that was given leaves of a model's positions, and a note."""
    lengths = {key: getattr(rollout, key) for key in ("max_prompt_tokens", "max_completion_tokens")}
    default = [key for key in lengths if key not in rollout.model_fields_set]
    left = positions - sum(length for key, length in lengths.items() if key not in default)
    if sum(lengths.values()) <= positions or not 0 < len(default) <= left:
        return {}, []
    lowered = dict.fromkeys(default, left // len(default))
    text = ", ".join(f"rollout.{key}={length}" for key, length in lowered.items())
    return lowered, [f"{text}: lower than the default, as {name} has {positions} positions"]


def _check_key(setting: str, variable: str | None) -> Iterator[str]:
    if variable is not None and not os.environ.get(variable):
        yield f"{setting}={variable!r}: this environment variable is not set; export it"


def _check_sources(trained: Sequence[sources.EnvironmentConfig], sets: Sequence[EvaluationSetConfig]) -> Iterator[str]:
    for index, source in enumerate(trained):
        yield from _check_source(f"environments.{index}", source)
    for index, entry in enumerate(sets):
        yield from _check_source(f"evaluation.sets.{index}.source", entry.source)
        if entry.answer is not None:
            yield from _check_code(f"evaluation.sets.{index}.answer", entry.answer)


def _check_code(key: str, name: str) -> Iterator[str]:
    """Yield a line if the file of user code is missing. The object in it is looked up when a rank imports the file."""
    if (location := name.rpartition(":")[0]) == "__main__":
        yield f"{key}={name!r}: an object {_OF_PROGRAM}"
    elif location.endswith(".py") and not Path(location).expanduser().is_file():
        yield f"{key}={name!r}: no such file"


def _check_program(key: str, name: str) -> Iterator[str]:
    """Yield a line if `name` is neither a Python file, nor an executable, nor the name of a function."""
    if ":" in name:
        yield from _check_code(key, name)
    elif name.endswith(".py"):
        if not Path(name).is_file():
            yield f"{key}={name!r}: no such file"
    elif shutil.which(name) is None and not (Path(name).is_file() and os.access(name, os.X_OK)):
        yield f"{key}={name!r}: neither an executable file nor a command in PATH"


def _check_source(key: str, source: sources.EnvironmentConfig) -> Iterator[str]:
    if isinstance(source, schema.AtroposSourceConfig):
        yield from _check_key(f"{key}.api_key_variable", source.api_key_variable)
        yield from _check_key(f"{key}.server.api_key_variable", source.server.api_key_variable)
        return
    for path, name in sources.prompt_functions(source):
        yield from _check_code(f"{key}.{dotted(path)}", name)
    if not isinstance(source, sources.RowsSourceConfig):
        if not isinstance(source, NamedObject) or source.given is None:
            yield from _check_code(f"{key}.name", source.name)
        return
    if isinstance(source, sources.AgentSourceConfig):
        yield from _check_program(f"{key}.program", source.program)
    if isinstance(source, sources.DatasetSourceConfig):
        for number, reward in enumerate(source.rewards):
            if reward.given is None:
                place, model = f"{key}.rewards.{number}", reward.model
                yield from _check_reward_model(place, model) if model else _check_code(place, reward.name)
    if source.given is not None:
        return
    if source.name == sources.TRAIN_DATASET or source.name.startswith(f"{sources.EVAL_DATASETS}["):
        yield f"{key}.name={source.name!r}: rows {_OF_PROGRAM}"
        return
    there, readable = Path(source.name).is_file(), source.name.lower().endswith(sources.DATA_SUFFIXES)
    if readable and not there:
        yield f"{key}.name={source.name!r}: no such file (in {os.getcwd()}, or beside the config)"
    if there and not readable:
        yield f"{key}.name={source.name!r}: unsupported format; supported: {', '.join(sources.DATA_SUFFIXES)}"


def _check_reward_model(key: str, settings: schema.ModelConfig) -> Iterator[str]:
    """Yield a line if the folder or name is not that of a sequence classification model with one label."""
    try:
        model = config_json.read_config_json(settings, key)
    except ConfigError as error:
        yield str(error)
        return
    kind, labels = str(model.get("architectures")), model.get("num_labels") or len(model.get("id2label") or "01")
    if "ForSequenceClassification" not in kind or labels != 1:
        found = f"architectures={kind}, number of labels: {labels}"
        yield f"{key}={settings.name!r}: {found}; a reward model is a ...ForSequenceClassification with one label"


def check_hub(settings: schema.HubConfig | None) -> Iterator[str]:
    """Yield a line for each local reason why pushes would fail. Sends no request to the Hub."""
    if settings is None:
        return
    from huggingface_hub import constants, errors, get_token, utils

    key = f"hub.repo={settings.repo!r}"
    try:
        utils.validate_repo_id(settings.repo)
    except errors.HFValidationError as error:
        yield f"{key}: {str(error).split(':')[0]}"
    if constants.HF_HUB_OFFLINE:
        yield f"{key}: HF_HUB_OFFLINE is set; unset it, or remove hub"
    elif os.environ.get("RANK", "0") == "0" and not get_token():  # only rank 0 pushes
        yield f"{key}: no token; set HF_TOKEN to one that may write, or run `hf auth login`"


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PEFT_KEYS = {
    "r": "rank",
    "lora_alpha": "alpha",
    "use_rslora": "rslora",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
    "layers_to_transform": "layers",
}
"""PEFT's names -> names in LoRAConfig."""
_UNSUPPORTED_BY_LORA = (
    *("alora_invocation_tokens", "alpha_pattern", "arrow_config", "kasa_config", "layer_replication", "lora_bias"),
    *("modules_to_save", "rank_pattern", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora"),
    *("use_qalora", "velora_config"),
)
"""PEFT's settings that change the adapter's computation or its tensors. Each must be empty or false."""
_CHANGES_BASE = {"corda", "loftq", "lora_ga", "olora", "pissa"}
"""Values of init_lora_weights that modify the base weights. The adapter's folder does not contain the modified base."""


def missing_adapter_files(lora: training.LoRAConfig | None) -> Iterator[str]:
    """Yield a line if policy.lora.init is not a PEFT adapter. The adapter's contents are checked when it is read."""
    if lora is None or lora.init == DEFAULT_INIT:
        return
    key, folder = f"policy.lora.init={lora.init!r}", Path(lora.init)
    if not folder.is_dir():
        yield f"{key}: no such folder; write default or the folder of a PEFT adapter (download one of the Hub first)"
    elif not (folder / ADAPTER_CONFIG).is_file():
        yield f"{key}: no {ADAPTER_CONFIG} in this folder; expected an adapter saved by PEFT"
    elif not (folder / ADAPTER_WEIGHTS).is_file():
        if (folder / "adapter_model.bin").is_file():
            yield f"{key}: reading adapter_model.bin can run code; load it in PEFT and save it as {ADAPTER_WEIGHTS}"
        else:
            yield f"{key}: no {ADAPTER_WEIGHTS} in this folder; expected an adapter saved by PEFT"


def with_adapter_settings(config: Config) -> Config:
    """Return the config with the settings of the adapter in policy.lora.init. Raises ConfigError if they do not fit."""
    if (lora := config.policy.lora) is None or lora.init == DEFAULT_INIT:
        return config
    setting = f"policy.lora.init={lora.init!r}"
    try:
        saved: JsonObject = json.loads((Path(lora.init) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: cannot read {ADAPTER_CONFIG} ({error})") from None
    for key, value in _unsupported(saved).items():
        raise ConfigError(f"{setting}: {key}={value!r} in {ADAPTER_CONFIG} is not supported")
    # Only the last part of each name is compared, because the model may have been downloaded into a folder of its name.
    base, model = saved.get("base_model_name_or_path"), config.model.name
    if base and Path(base).name.lower() != Path(model).name.lower():
        advice = f"if both are the same model, correct base_model_name_or_path in {ADAPTER_CONFIG}"
        raise ConfigError(f"{setting}: the adapter was trained on {base}, not on model.name={model!r}; {advice}")
    nullable = {"exclude_modules", "layers"}
    found = {new: saved.get(old) for old, new in _PEFT_KEYS.items() if new in nullable or saved.get(old) is not None}
    given = lora.model_dump(exclude_unset=True)
    try:
        # Validation parses "20-31" into a list of numbers, so the text and the list compare equal.
        resolved = training.LoRAConfig.model_validate({**given, **found})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{setting}: {first['loc'][0]} in {ADAPTER_CONFIG}: {first['msg']}") from None
    for name in _PEFT_KEYS.values():
        if name in given and _plain(given[name]) != _plain(getattr(resolved, name)):
            rule = f"the adapter {setting} has {getattr(resolved, name)}; leave the setting out"
            raise ConfigError(f"policy.lora.{name}={given[name]}: {rule}")
    return config.with_values("policy", lora=resolved)


def _unsupported(saved: JsonObject) -> JsonObject:
    """Return the entries of an adapter's settings that this trainer's plain LoRA cannot represent."""
    wrong = {key: saved[key] for key in _UNSUPPORTED_BY_LORA if saved.get(key)}
    if saved.get("peft_type") != "LORA":
        wrong["peft_type"] = saved.get("peft_type")
    if str(saved.get("init_lora_weights")).partition("_niter")[0] in _CHANGES_BASE:
        wrong["init_lora_weights"] = saved["init_lora_weights"]
    if saved.get("bias", "none") != "none":
        wrong["bias"] = saved["bias"]
    return wrong


def _plain(value: object) -> object:
    """Return a sorted copy of a list, so that the order does not affect comparisons. Other values are unchanged."""
    return sorted(value) if isinstance(value, list) else value
