"""Names of adapter settings: TRL's ModelConfig, and PEFT's LoraConfig (section `peft_config`).

TRL reads its names only with `use_peft: true`. Here, each of TRL's names sets an adapter unless `use_peft: false` is
given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from colocated_grpo.settings.base import DEFAULT_INIT
from colocated_grpo.settings.errors import SettingsTree
from colocated_grpo.settings.names.kinds import (
    Alias,
    Lookup,
    NewSettings,
    each,
    not_needed,
    not_supported,
    one_of,
    renamed,
    unless_null,
)
from colocated_grpo.settings.training import ALL_LINEAR, no_dropout

RANK, ALPHA, TARGETS = "policy.lora.rank", "policy.lora.alpha", "policy.lora.target_modules"
_PEFT_TARGETS = ["q_proj", "v_proj"]
"""Modules that PEFT adapts by default in Llama, Mistral, Qwen and Gemma models."""
_TRL_DEFAULTS = {"lora_r": (RANK, 16), "lora_alpha": (ALPHA, 32), "lora_target_modules": (TARGETS, _PEFT_TARGETS)}
"""For each old name: the new name, and the default of TRL 1.16."""
_PEFT_DEFAULTS = {
    "peft_config.r": (RANK, 8),
    "peft_config.lora_alpha": (ALPHA, 8),
    "peft_config.target_modules": (TARGETS, _PEFT_TARGETS),
}
_TRL_DROPOUT = 0.05
"""Default of TRL 1.16."""
_REGULAR_EXPRESSION = re.compile(r"[*+?()\[\]{}|^$\\]")


def add_rank(tree: SettingsTree) -> None:
    """Add `r: null` to a `peft_config` without a rank, in place. The translation of `r` then sets PEFT's defaults."""
    if isinstance(tree.get("peft_config"), dict):
        tree["peft_config"].setdefault("r")


def _with_defaults(settings: NewSettings, get: Lookup, defaults: Mapping[str, tuple[str, object]]) -> NewSettings:
    """Return `settings`, and the default of each entry of `defaults` that is given under neither old nor new name.

    With policy.lora.init, return only `settings`: the adapter that the run continues from determines all others.
    """
    if get("policy.lora.init") not in (None, DEFAULT_INIT):
        return settings
    missing = {
        new: default
        for old, (new, default) in defaults.items()
        if new not in settings and get(old) is None and get(new) is None
    }
    return settings | missing


def _settings(settings: NewSettings, get: Lookup) -> NewSettings:
    """Return `settings` with TRL's defaults; return no settings if TRL would train all weights."""
    return {} if get("use_peft") is False else _with_defaults(settings, get, _TRL_DEFAULTS)


def _adapter(new_name: str) -> Alias:
    return Alias(unless_null(lambda _key, value, get: _settings({new_name: value}, get)), new_name)


@unless_null
def _target_modules(_key: str, value: object, get: Lookup) -> NewSettings:
    return _settings({TARGETS: _modules(value)}, get)


def _modules(value: object) -> object:
    """Convert module names to a list, and all-linear or a regular expression to text."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]  # like TRL, whose command line makes a list of one value
    is_name = isinstance(value, str) and value != ALL_LINEAR and not _REGULAR_EXPRESSION.search(value)
    return [value] if is_name else value


@unless_null
def _dropout(_key: str, value: float, get: Lookup) -> NewSettings:
    if value != _TRL_DROPOUT:
        no_dropout(value)
    return _settings({"policy.lora.dropout": 0.0}, get)


@unless_null
def _rslora(_key: str, value: object, get: Lookup) -> NewSettings:
    is_default = value is False and get("policy.lora.rslora") is None
    return {} if is_default else _settings({"policy.lora.rslora": value}, get)


@unless_null
def _use_peft(_key: str, value: object, get: Lookup) -> NewSettings:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    if not value and get("policy.lora") is not None:
        raise ValueError("policy.lora is given; remove one of them, or set policy.lora: null")
    return _with_defaults({}, get, _TRL_DEFAULTS) if value else {}


def _peft_rank(_key: str, value: object, get: Lookup) -> NewSettings:
    return _with_defaults({} if value is None else {RANK: value}, get, _PEFT_DEFAULTS)


@unless_null
def _peft_target_modules(_key: str, value: object, _get: Lookup) -> NewSettings:
    return {TARGETS: _modules(value)}


def _only_empty(instead: str) -> Alias:
    """Return an alias that accepts only null, false and empty values, which are PEFT's defaults."""

    def translate(_key: str, value: object, _get: Lookup) -> NewSettings:
        if value:
            raise ValueError(f"not supported; {instead}")
        return {}

    return Alias(translate, remark="off")


_ALL_TRAINED = "an adapter is all that is trained; policy.train_layers trains whole blocks instead"
_LINEAR_ONLY = "only linear layers have adapters: policy.lora.target_modules"
_PLAIN_LORA = "adapters are plain LoRA, or rslora"
_SIXTEEN_BITS = "base weights are 16-bit; policy.lora.base_on_host frees their GPU memory"
_INIT = "A is drawn uniformly, B is zero; policy.lora.init continues from an adapter"

TRL_LORA: dict[str, Alias] = {
    "lora_r": _adapter(RANK),
    "lora_alpha": _adapter(ALPHA),
    "lora_target_modules": Alias(_target_modules, TARGETS),
    "lora_dropout": Alias(
        _dropout,
        "policy.lora.dropout",
        f"{_TRL_DROPOUT:g}, the default of TRL, becomes 0: the engine samples without dropout",
    ),
    "lora_modules_to_save": _only_empty(_ALL_TRAINED),
    "lora_target_parameters": _only_empty(_LINEAR_ONLY),
    "lora_task_type": one_of("causal language models are trained", {"causal_lm": None}),
    "use_rslora": Alias(_rslora, "policy.lora.rslora"),
    "use_dora": one_of(_PLAIN_LORA, {False: None}),
    "use_peft": Alias(
        _use_peft, "policy.lora", "true: an adapter, policy.lora; false: none, and lora_* have no effect"
    ),
    "lora_rank": not_supported("write policy: {lora: {rank: 8}}, or lora_r"),
    "lora_config": not_supported("write policy: {lora: {rank: 8}}, or peft_config"),
    **each("load_in_4bit load_in_8bit", one_of(_SIXTEEN_BITS, {False: None})),
    **each("bnb_4bit_quant_type bnb_4bit_quant_storage use_bnb_nested_quant", not_needed("part of load_in_4bit")),
}

PEFT: dict[str, Alias] = {
    f"peft_config.{name}": alias
    for name, alias in {
        "r": Alias(_peft_rank, RANK),
        "lora_alpha": renamed(ALPHA),
        "lora_dropout": renamed("policy.lora.dropout"),
        "target_modules": Alias(_peft_target_modules, TARGETS),
        "exclude_modules": renamed("policy.lora.exclude_modules"),
        "layers_to_transform": renamed("policy.lora.layers"),
        "use_rslora": renamed("policy.lora.rslora"),
        "layers_pattern": one_of("the transformer blocks", {"layers": None, "h": None}),
        "init_lora_weights": one_of(_INIT, {True: None}),
        "bias": one_of("biases are not trained", {"none": None}),
        "peft_type": one_of(_PLAIN_LORA, {"lora": None}),
        "task_type": one_of("causal language models are trained", {"causal_lm": None}),
        "inference_mode": one_of("a run trains", {False: None}),
        **each("modules_to_save trainable_token_indices lora_bias", _only_empty(_ALL_TRAINED)),
        "target_parameters": _only_empty(_LINEAR_ONLY),
        **each(
            "rank_pattern alpha_pattern",
            _only_empty("all layers have the same policy.lora.rank and policy.lora.alpha"),
        ),
        **each(
            "alora_invocation_tokens arrow_config corda_config ensure_weight_tying eva_config kasa_config "
            "layer_replication loftq_config lora_ga_config megatron_config monteclora_config use_bdlora use_dora "
            "use_qalora velora_config",
            _only_empty(_PLAIN_LORA),
        ),
        **each(
            "auto_mapping base_model_name_or_path fan_in_fan_out revision",
            not_needed("model.name and model.revision determine the model"),
        ),
        **each("megatron_core peft_version qalora_group_size runtime_config", not_needed("no effect on plain LoRA")),
    }.items()
}

LORA = {**PEFT, **TRL_LORA}
"""Adapter settings. The switch use_peft comes last, because the other names look it up."""
