"""Translates the setting names of other trainers. The tables for ToSSim's co-located trainer and for adapters are here.

Error lines for names without an equal setting say what to write instead.
"""

import re
from dataclasses import replace

from colocated_grpo.settings import base, errors, generation, training
from colocated_grpo.settings.names import trl
from colocated_grpo.settings.names.trl import Alias, Lookup, NewSettings, each, not_needed, one_of, renamed, renames
from colocated_grpo.settings.tree import assign, lookup


def _engine_argument(key: str, value: object, _get: Lookup) -> NewSettings:
    if key == "enable_sleep_mode":
        return {"engine.sleep": value}
    is_field = key in generation.EngineConfig.model_fields and key != "args"
    return {f"engine.{key}" if is_field else f"engine.args.{key}": value}


def group_size_of(completions: int) -> int:
    """Return a group size for completions: the first of 8, 4, 2 that divides them, else the smallest divisor."""
    return next(size for size in (8, 4, *range(2, completions + 1)) if completions % size == 0)


def _completions(_key: str, value: object, get: Lookup) -> NewSettings:
    group_size = get("rollout.group_size") or generation.RolloutConfig().group_size
    if not isinstance(value, int) or not isinstance(group_size, int) or value % group_size:
        shown = errors.show(group_size)
        raise ValueError(f"counts completions, so it must be a multiple of rollout.group_size={shown}")
    return {"rollout.prompts_per_step": value // group_size}


def _completions_of_any_group(key: str, value: object, get: Lookup) -> NewSettings:
    """Translate ToSSim's batch size. Without a group size, one that divides the batch is chosen."""
    default = generation.RolloutConfig().group_size
    if get("rollout.group_size") is None and isinstance(value, int) and value > 1 and value % default:
        size = group_size_of(value)
        return {"rollout.prompts_per_step": value // size, "rollout.group_size": size}
    return _completions(key, value, get)


def _loss_type(_key: str, value: object, get: Lookup) -> NewSettings:
    """Set the loss. TRL's name for GSPO is `grpo` with importance sampling per sequence."""
    is_gspo = value == "grpo" and get("importance_sampling_level") == "sequence"
    return {"loss.type": "gspo" if is_gspo else value}


_SCALE = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}

_TOSSIM: dict[str, Alias] = {
    "model_name": renamed("model.name"),
    "vllm_config.*": Alias(_engine_argument, "engine", reads_null=True),
    "fsdp_config.sharding_strategy": one_of("policy.replicate", {"full_shard": None, "hybrid_shard": "nodes"}),
    **renames("policy", "cpu_offload=fsdp_config.cpu_offload"),
    **renames("policy", "gradient_checkpointing=fsdp_config.activation_checkpointing"),
    "fsdp_config.mixed_precision": one_of(
        "policy.compute_dtype", {True: None, False: "float32"}, "true is the default: bfloat16 on CUDA"
    ),
    "fsdp_config.use_orig_params": not_needed("FSDP2 always keeps the original parameters"),
    "fsdp_config.sync_state": not_needed("every rank loads the same checkpoint"),
    **each("offload_full_state_dict_to_cpu rank0_only_state_dict", not_needed("shards are saved"), "fsdp_config."),
    "fsdp_config.checkpoint_dir": renamed("output_dir"),
    **each("max_iterations max_ticks", renamed("training_steps")),
    "sync_every": renamed("sync_frequency"),
    "min_learning_rate": renamed("policy.min_lr", also={"policy.schedule": "cosine"}),  # ToSSim's only schedule
    **renames("policy", "grad_clip=gradient_clip_norm warmup_steps=warmup_ticks"),
    **each("max_tokens max_tokens_per_gen", renamed("rollout.max_completion_tokens")),
    "k_per_prompt": renamed("rollout.group_size"),
    **renames("engine", "tensor_parallel_size max_model_len"),
    **each("log_interval log_ticks", not_needed("every step is logged")),
    "csv_path": not_needed("metrics are written to metrics.jsonl in the run folder"),
    **each("sample_log_interval sample_log_path", not_needed("rollouts go to rollouts.jsonl in the run folder")),
    "save_ticks": renamed("checkpoint.every"),
    "eval_ticks": renamed("evaluation.every"),
    "max_think_tokens": not_needed("rollout.max_completion_tokens limits the whole completion"),
    **each(
        "early_stop_parse_rate early_stop_consecutive_ticks",
        not_needed("of the game: stop_at_parse_rate and stop_after of an environment with type: turns"),
    ),
    **each(
        "num_games num_concurrent_games active_seats_per_game",
        not_needed("of the game: args of an environment with type: turns and name: tossim"),
    ),
    **each("enable_verbosity_penalty verbosity_penalty", one_of("subtract it in a reward function", {0: None})),
    "const_baseline": one_of("advantages are relative to the group", {0: None}),
    **each(
        "verbosity_penalty_rate expected_convergence_ticks expected_initial_parse_rate expected_initial_legal_rate",
        not_needed("nothing reads it"),
    ),
    "quant_mode": trl.not_supported("policy.compute_dtype is the policy's type, engine.args.quantization the engine's"),
    "output_hub_repo": renamed("hub.repo"),
    # Names that TRL has as well
    "learning_rate": renamed("policy.lr"),
    "beta": renamed("loss.kl.coef"),
    **renames("rollout", "temperature top_p top_k min_p repetition_penalty"),
    "loss_type": Alias(_loss_type, "loss.type"),
    "scale_rewards": one_of("advantage.scale", _SCALE),
    "use_wandb": one_of("tracking.wandb", {True: "online", False: "off"}),
    **renames("tracking", "wandb_project wandb_group"),
}

# PEFT's LoraConfig, and TRL's flags for adapters

_RANK, _ALPHA, _TARGETS = "policy.lora.rank", "policy.lora.alpha", "policy.lora.target_modules"
_MODULES = ["q_proj", "v_proj"]
"""Modules that PEFT adapts by default in Llama, Mistral, Qwen and Gemma models."""
_TRL_ADAPTER = {_RANK: 16, _ALPHA: 32, _TARGETS: _MODULES}
"""Defaults of TRL 1.16 with `use_peft`."""
_PEFT_ADAPTER = {_RANK: 8, _ALPHA: 8, _TARGETS: _MODULES}
_REGULAR_EXPRESSION = re.compile(r"[*+?()\[\]{}|^$\\]")
_PLAIN = "adapters are plain LoRA, or rslora, of linear layers: docs/guides/lora.md"


def _missing(defaults: NewSettings, get: Lookup) -> NewSettings:
    """Return the defaults that are not set yet; none with policy.lora.init, whose adapter determines all others."""
    if get("policy.lora.init") not in (None, base.DEFAULT_INIT):
        return {}
    return {name: value for name, value in defaults.items() if get(name) is None}


def _target_modules(_key: str, value: object, _get: Lookup) -> NewSettings:
    """Convert module names to a list. all-linear and regular expressions stay text."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]  # like TRL, whose command line makes a list of one value
    is_name = isinstance(value, str) and value != training.ALL_LINEAR and not _REGULAR_EXPRESSION.search(value)
    return {_TARGETS: [value] if is_name else value}


def _peft_rank(_key: str, value: object, get: Lookup) -> NewSettings:
    return _missing(_PEFT_ADAPTER, get) | ({} if value is None else {_RANK: value})


def _use_peft(_key: str, value: object, get: Lookup) -> NewSettings:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    if not value and get("policy.lora") is not None:
        raise ValueError("an adapter is set by policy.lora or lora_*; remove one of them")
    return _missing(_TRL_ADAPTER, get) if value else {}


_DROPOUT = Alias(
    lambda _key, _value, _get: {"policy.lora.dropout": 0.0},
    "policy.lora.dropout",
    "trained without dropout, because the engine samples without it",
)

# `r` and `use_peft` come last: they set defaults for what is not given.
_LORA: dict[str, Alias] = {
    "peft_config.lora_alpha": renamed(_ALPHA),
    "peft_config.lora_dropout": _DROPOUT,
    "peft_config.target_modules": Alias(_target_modules, _TARGETS),
    **renames("policy.lora", "exclude_modules=peft_config.exclude_modules layers=peft_config.layers_to_transform"),
    **renames("policy.lora", "rslora=peft_config.use_rslora"),
    "peft_config.bias": one_of("biases are not trained", {"none": None}),
    "peft_config.task_type": one_of("causal language models are trained", {"causal_lm": None}),
    "peft_config.r": Alias(_peft_rank, _RANK, reads_null=True),
    "lora_r": renamed(_RANK),
    "lora_alpha": renamed(_ALPHA),
    "lora_target_modules": Alias(_target_modules, _TARGETS),
    "lora_dropout": _DROPOUT,
    "lora_task_type": one_of("causal language models are trained", {"causal_lm": None}),
    "use_rslora": one_of("policy.lora.rslora", {True: True, False: None}),
    "load_in_4bit": one_of("policy.lora.base_dtype", {True: "nf4", False: None}),
    **each("lora_modules_to_save lora_target_parameters use_dora", trl.not_supported(_PLAIN)),
    "use_peft": Alias(_use_peft, "policy.lora"),
}

_COUNTED = "counts completions, over all ranks"
_BATCH_SIZES = {
    "generation_batch_size": Alias(_completions, "rollout.prompts_per_step", _COUNTED),
    "batch_size": Alias(_completions_of_any_group, "rollout.prompts_per_step", _COUNTED),
}

# The names are translated in this order. Batch sizes count completions, so the group size must be translated first.
ALIASES: dict[str, Alias] = {**_TOSSIM, **trl.TRL, **_LORA, **_BATCH_SIZES}

_VERL_SECTIONS = (
    "actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "data", "reward", "reward_model", "trainer",
)  # fmt: skip
_PRIME_RL_SECTIONS = ("orchestrator", "inference")
_SECTIONS = sorted({name.split(".")[0] for name in ALIASES if "." in name})
_SUGGESTED = {
    "rollout.group_size": "n_samples_per_prompt rollouts_per_example grpo_samples",
    "rollout.prompts_per_step": "rollout_batch_size train_batch_size",
    "rollout.max_completion_tokens": "generate_max_len max_generated_tokens max_new_tokens",
    "rollout.max_prompt_tokens": "prompt_max_len",
    "rollout.max_staleness": "max_async_level",
    "loss.kl.coef": "init_kl_coef kl_coeff",
    "loss.clip_low": "eps_clip",
    "engine.max_model_len": "max_len max_seq_length seq_len sequence_len",
    "batch.max_tokens_per_micro_batch": "micro_batch_size micro_train_batch_size",
    "dataset_name": "dataset prompt_data",
    "environments": "env",
    "policy.lora": "adapter",
    "model.name": "base_model pretrain",
    "checkpoint.every": "save_every",
    "output_dir": "save_path",
    "training_steps": "num_episodes num_epochs",
}
"""Setting -> names of OpenRLHF, prime-rl, torchtune, Unsloth and Axolotl for which it is suggested."""


def new_names() -> dict[str, str]:
    """Return the name to suggest for each old dotted name: the new one, or the old one without a single new setting."""
    names = {old: alias.new_name for old, alias in ALIASES.items()}
    suggested = {name: new for new, names in _SUGGESTED.items() for name in names.split()}
    return {old: old if not new or " " in new else new for old, new in names.items()} | suggested


def translate_names(tree: errors.SettingsTree, locations: errors.Locations) -> list[str]:
    """Replace old names in `tree` and `locations` by new names, in place, and return notes for the user.

    A name on the command line takes precedence over another name of the same setting in the file. Raises ConfigError
    for unsupported values, and for two names of one setting in the same place.
    """
    if isinstance(peft := tree.get("peft_config"), dict):
        peft.setdefault("r")  # whose translation sets PEFT's defaults
    for name in ("fsdp", *_SECTIONS):
        if not tree.get(name, True):  # null, "" or []: an empty section in a file of another trainer
            del tree[name]
    if isinstance(tree.get("fsdp"), dict):
        if "fsdp_config" in tree:
            suffix = errors.location_suffix(("fsdp",), locations)
            raise errors.ConfigError(f"fsdp: the same section as fsdp_config; remove one of them{suffix}")
        tree["fsdp_config"] = tree.pop("fsdp")
        for path in [path for path in locations if path[0] == "fsdp"]:
            locations["fsdp_config", *path[1:]] = locations.pop(path)
    problems = [
        f"{name}={errors.show(tree[name])}: must be a mapping of settings"
        for name in _SECTIONS
        if name in tree and not isinstance(tree[name], dict)
    ]
    is_prime_rl = not tree.keys().isdisjoint(_PRIME_RL_SECTIONS)
    whose = "prime-rl; docs/settings.md" if is_prime_rl else "verl; docs/guides/from_verl.md"
    for name in (*_VERL_SECTIONS, *_PRIME_RL_SECTIONS):
        if name in tree:
            suffix = errors.location_suffix((name,), locations)
            problems.append(f"{name}: a section of {whose} lists the settings to use{suffix}")
    errors.raise_on(*problems)
    plain: list[str] = []
    notes: list[str] = []
    without_effect: dict[str, list[str]] = {}
    for pattern, alias in ALIASES.items():
        for path in _uses(pattern, tree):
            old = lookup(tree, path)
            try:
                values = _translate_one(tree, locations, path, alias)
            except ValueError as rule:
                location = errors.location_suffix(path, locations)
                problems.append(f"{errors.dotted(path)}={errors.show(old)}: {rule}{location}")
                continue
            if not values:
                without_effect.setdefault(alias.remark, []).append(errors.dotted(path))
            elif list(values.values()) == [old] and not alias.remark:
                plain += [f"{errors.dotted(path)} -> {next(iter(values))}"]
            else:
                settings = ", ".join(f"{name}={errors.show(value)}" for name, value in values.items())
                notes += [f"{errors.dotted(path)}: translated to {settings}{_reason(alias.remark)}"]
    for name in _SECTIONS:
        leftover = tree.pop(name, {}) if not problems else {}
        valid = ", ".join(old.split(".")[1] for old in ALIASES if old.startswith(f"{name}."))
        problems += [
            f"{name}.{key}: unknown key; valid: {valid}{errors.location_suffix((name, key), locations)}"
            for key in leftover
        ]
    errors.raise_on(*problems)
    notes += [f"{', '.join(names)}: nothing to set{_reason(remark)}" for remark, names in without_effect.items()]
    return ([f"translated names: {', '.join(plain)}"] if plain else []) + notes


def _reason(remark: str) -> str:
    return f" ({remark})" if remark else ""


def _uses(pattern: str, tree: errors.SettingsTree) -> list[errors.KeyPath]:
    *section, name = pattern.split(".")
    parent = tree.get(section[0], {}) if section else tree
    names = list(parent) if name == "*" else [name] if name in parent else []
    return [(*section, found) for found in names]


def _translate_one(
    tree: errors.SettingsTree, locations: errors.Locations, path: errors.KeyPath, alias: Alias
) -> NewSettings:
    # A key merged by a YAML anchor has no line.
    location = locations.get(path, errors.SettingLocation(where="config file"))
    values, old = {}, lookup(tree, path)
    if old is not None or alias.reads_null:
        values = alias.translate(str(path[-1]), old, lambda name: lookup(tree, errors.parse_path(name)))
    for name, value in values.items():
        new_path = errors.parse_path(name)
        if (existing := locations.get(new_path)) and existing.on_command_line == location.on_command_line:
            place = "" if existing.on_command_line else f" in {existing.where}"
            raise ValueError(f"the same setting as {existing.old_name or name}{place}; remove one of them")
        if existing and existing.on_command_line:
            continue
        assign(tree, new_path, value)
        locations[new_path] = replace(location, old_name=errors.dotted(path))
    lookup(tree, path[:-1]).pop(path[-1])
    return values
