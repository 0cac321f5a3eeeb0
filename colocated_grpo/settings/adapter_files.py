"""Reads the settings of the PEFT adapter that a run continues from (adapter_config.json)."""

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from colocated_grpo.errors import ConfigError
from colocated_grpo.settings.base import DEFAULT_INIT
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.training import LoRAConfig
from colocated_grpo.types import JsonObject

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_KEYS = {
    "r": "rank",
    "lora_alpha": "alpha",
    "use_rslora": "rslora",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
    "layers_to_transform": "layers",
}
"""PEFT's names -> names in LoRAConfig."""
_UNSUPPORTED = (
    *("alora_invocation_tokens", "alpha_pattern", "arrow_config", "kasa_config", "layer_replication", "lora_bias"),
    *("modules_to_save", "rank_pattern", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora"),
    *("use_qalora", "velora_config"),
)
"""PEFT's settings that change the adapter's computation or its tensors. Each must be empty or false."""
_CHANGES_BASE = {"corda", "loftq", "lora_ga", "olora", "pissa"}
"""Values of init_lora_weights that modify the base weights. The adapter's folder does not contain the modified base."""


def missing_adapter_files(lora: LoRAConfig | None) -> Iterator[str]:
    """Yield a line if policy.lora.init is not a PEFT adapter. The adapter's contents are checked when it is read."""
    if lora is None or lora.init == DEFAULT_INIT:
        return
    key, folder = f"policy.lora.init={lora.init!r}", Path(lora.init)
    if not folder.is_dir():
        yield f"{key}: no such folder; write default or the folder of a PEFT adapter (download one of the Hub first)"
    elif not (folder / CONFIG_FILE).is_file():
        yield f"{key}: no {CONFIG_FILE} in this folder; expected an adapter saved by PEFT"
    elif not (folder / WEIGHTS_FILE).is_file():
        if (folder / "adapter_model.bin").is_file():
            yield f"{key}: reading adapter_model.bin can run code; load it in PEFT and save it as {WEIGHTS_FILE}"
        else:
            yield f"{key}: no {WEIGHTS_FILE} in this folder; expected an adapter saved by PEFT"


def with_adapter_settings(config: Config) -> Config:
    """If policy.lora.init is an adapter, return the config with the adapter's settings in policy.lora.

    Raises ConfigError if the adapter is of an unsupported kind, if its base model has another name than model.name, or
    if the adapter contradicts a setting given by the user.
    """
    lora = config.policy.lora
    if lora is None or lora.init == DEFAULT_INIT:
        return config
    setting = f"policy.lora.init={lora.init!r}"
    try:
        saved: JsonObject = json.loads((Path(lora.init) / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: cannot read {CONFIG_FILE} ({error})") from None
    for key, value in _unsupported(saved).items():
        raise ConfigError(f"{setting}: {key}={value!r} in {CONFIG_FILE} is not supported")
    # Only the last part of each name is compared, because the model may have been downloaded into a folder of its name.
    base, model = saved.get("base_model_name_or_path"), config.model.name
    if base and Path(base).name.lower() != Path(model).name.lower():
        raise ConfigError(
            f"{setting}: the adapter was trained on {base}, not on model.name={model!r}; if both are the same model, "
            f"correct base_model_name_or_path in {CONFIG_FILE}"
        )
    nullable = {"exclude_modules", "layers"}
    found = {new: saved.get(old) for old, new in _KEYS.items() if new in nullable or saved.get(old) is not None}
    given = lora.model_dump(exclude_unset=True)
    try:
        # Validation parses "20-31" into a list of numbers, so the text and the list compare equal.
        resolved = LoRAConfig.model_validate({**given, **found})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{setting}: {first['loc'][0]} in {CONFIG_FILE}: {first['msg']}") from None
    for name in _KEYS.values():
        if name in given and _plain(given[name]) != _plain(getattr(resolved, name)):
            raise ConfigError(
                f"policy.lora.{name}={given[name]}: the adapter {setting} has {getattr(resolved, name)}; leave the "
                "setting out"
            )
    return config.model_copy(update={"policy": config.policy.model_copy(update={"lora": resolved})})


def adapter_shape(lora: LoRAConfig | None) -> JsonObject:
    """Return the settings that determine an adapter's shape and scale. A resumed run must have the same values."""
    if lora is None:
        return {"policy.lora": "null"}
    return {
        "policy.lora": "an adapter",
        "policy.lora.rank": lora.rank,
        "policy.lora.alpha": lora.alpha,
        "policy.lora.rslora": lora.rslora,
        "policy.lora.base_dtype": lora.base_dtype,
    }


def _unsupported(saved: JsonObject) -> JsonObject:
    """Return the entries of an adapter's settings that this trainer's plain LoRA cannot represent."""
    wrong = {key: saved[key] for key in _UNSUPPORTED if saved.get(key)}
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
