"""Names that other trainers use for our settings: one table, and the code that applies it.

Sources: the co-located ToSSim trainer's YAML, and TRL's `GRPOConfig`. A name is here only when its meaning is exact;
one without an equivalent says what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from colocated_grpo.config.errors import ConfigError, Origin, Path, dotted, place_of, show
from colocated_grpo.config.schema import EngineConfig, RolloutConfig
from colocated_grpo.config.tree import lookup, place, remove

Lookup = Callable[[str], Any]
"""Value at a dotted path of the settings as far as they are translated, or None."""


@dataclass(frozen=True)
class Alias:
    translate: Callable[[str, Any, Lookup], dict[str, Any]]
    """(last part of the old name, value, lookup) -> values by new dotted name. Raises ValueError with the rule."""
    new_name: str
    """For suggestions."""
    remark: str = ""
    """Added to the note."""


def _renamed(new_name: str, remark: str = "") -> Alias:
    return Alias(lambda _key, value, _look: {new_name: value}, new_name, remark)


def _one_of(new_name: str, values: Mapping[Any, Any], remark: str = "") -> Alias:
    """Only the listed values have an equivalent. None in `values` means: it is so anyway, nothing to set."""

    def translate(_key: str, value: Any, _look: Lookup) -> dict[str, Any]:
        key = value.lower() if isinstance(value, str) else value
        if isinstance(key, dict | list) or key not in values:
            raise ValueError(f"no equivalent here; known are {', '.join(show(known) for known in values)} ({new_name})")
        return {} if values[key] is None else {new_name: values[key]}

    return Alias(translate, new_name, remark)


def _not_needed(why: str) -> Alias:
    return Alias(lambda _key, _value, _look: {}, "", why)


def _no_equivalent(instead: str) -> Alias:
    def translate(_key: str, _value: Any, _look: Lookup) -> dict[str, Any]:
        raise ValueError(f"no equivalent here; {instead}")

    return Alias(translate, instead)


def _engine_argument(key: str, value: Any, _look: Lookup) -> dict[str, Any]:
    if key == "enable_sleep_mode":
        return {"engine.sleep": value}
    is_field = key in EngineConfig.model_fields and key != "args"
    return {f"engine.{key}" if is_field else f"engine.args.{key}": value}


def _completions(key: str, value: Any, look: Lookup) -> dict[str, Any]:
    group_size = look("rollout.group_size") or RolloutConfig().group_size
    if not isinstance(value, int) or not isinstance(group_size, int) or value % group_size:
        raise ValueError(f"counts completions, so it must be a multiple of rollout.group_size={show(group_size)}")
    return {"rollout.prompts_per_step": value // group_size}


def _epsilon(_key: str, value: Any, look: Lookup) -> dict[str, Any]:
    has_upper_bound = look("epsilon_high") is not None or look("loss.clip_high") is not None
    return {"loss.clip_low": value} | ({} if has_upper_bound else {"loss.clip_high": value})


def _sampler_correction(_key: str, value: Any, look: Lookup) -> dict[str, Any]:
    modes = [f"{level}_{mode}" for level in ("token", "sequence") for mode in ("truncate", "mask")]
    if value not in modes:
        raise ValueError(f"must be one of {', '.join(modes)}")
    level, mode = value.split("_")
    off = look("vllm_importance_sampling_correction") is False
    return {"loss.correction.level": level} | ({} if off else {"loss.correction.mode": mode})


def _report_to(_key: str, value: Any, _look: Lookup) -> dict[str, Any]:
    trackers = {"wandb": {"tracking.wandb": "online"}, "tensorboard": {"tracking.tensorboard": True}, "none": {}}
    names = value if isinstance(value, list) else [value]
    if any(name not in trackers for name in names):
        raise ValueError(f"must be among {', '.join(trackers)}")
    return {path: setting for name in names for path, setting in trackers[name].items()}


_SCALE = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}
_GAME = "it belongs to a game: see args of environments with type: turns"

# Applied from top to bottom: batch sizes, which count completions, come after every name of the group size.
ALIASES: dict[str, Alias] = {
    # ToSSim co-located trainer
    "model_name": _renamed("model.name"),
    "vllm_config.*": Alias(_engine_argument, "engine"),
    "fsdp_config.sharding_strategy": _one_of("FSDP2", {"full_shard": None}, "shards are always full"),
    "fsdp_config.cpu_offload": _renamed("policy.cpu_offload"),
    "fsdp_config.mixed_precision": _one_of(
        "policy.compute_dtype", {True: None, False: "float32"}, "true is the default: bfloat16 on CUDA"
    ),
    "fsdp_config.activation_checkpointing": _renamed("policy.gradient_checkpointing"),
    "fsdp_config.use_orig_params": _not_needed("FSDP2 always keeps the original parameters"),
    "fsdp_config.sync_state": _not_needed("every rank loads the same checkpoint"),
    "fsdp_config.checkpoint_dir": _renamed("output_dir"),
    "max_iterations": _renamed("training_steps"),
    "max_ticks": _renamed("training_steps"),
    "sync_every": _renamed("sync_frequency"),
    "min_learning_rate": _renamed("policy.min_lr"),
    "gradient_clip_norm": _renamed("policy.grad_clip"),
    "warmup_ticks": _renamed("policy.warmup_steps"),
    "max_tokens": _renamed("rollout.max_completion_tokens"),
    "max_tokens_per_gen": _renamed("rollout.max_completion_tokens"),
    "k_per_prompt": _renamed("rollout.group_size"),
    "log_interval": _not_needed("every step is logged"),
    "log_ticks": _not_needed("every step is logged"),
    "csv_path": _not_needed("metrics go to metrics.jsonl in the run folder"),
    "sample_log_interval": _not_needed("tracking.rollouts_per_step rollouts of every step go to rollouts.jsonl"),
    "sample_log_path": _not_needed("sampled rollouts go to rollouts.jsonl in the run folder"),
    "max_think_tokens": _no_equivalent("rollout.max_completion_tokens bounds the whole completion"),
    "early_stop_parse_rate": _no_equivalent("see stop_at_parse_rate of environments with type: turns"),
    "early_stop_consecutive_ticks": _no_equivalent("see stop_after of environments with type: turns"),
    "quant_mode": _no_equivalent("policy.compute_dtype sets the training type, engine.args.quantization the engine's"),
    "output_hub_repo": _no_equivalent("upload final_model/ after the run"),
    "verbosity_penalty": _no_equivalent(_GAME),
    "num_games": _no_equivalent(_GAME),
    "num_concurrent_games": _no_equivalent(_GAME),
    "active_seats_per_game": _no_equivalent(_GAME),
    # both
    "learning_rate": _renamed("policy.lr"),
    "beta": _renamed("loss.kl.coef"),
    "temperature": _renamed("rollout.temperature"),
    "top_p": _renamed("rollout.top_p"),
    "top_k": _renamed("rollout.top_k"),
    "min_p": _renamed("rollout.min_p"),
    "repetition_penalty": _renamed("rollout.repetition_penalty"),
    "loss_type": _renamed("loss.type"),
    "scale_rewards": _one_of("advantage.scale", _SCALE),
    # TRL GRPOConfig
    "model_name_or_path": _renamed("model.name"),
    "trust_remote_code": _renamed("model.trust_remote_code"),
    "num_generations": _renamed("rollout.group_size"),
    "max_completion_length": _renamed("rollout.max_completion_tokens"),
    "max_prompt_length": _renamed("rollout.max_prompt_tokens", "longer prompts are dropped, not cut"),
    "num_iterations": _renamed("batch.epochs"),
    "epsilon": Alias(_epsilon, "loss.clip_low"),
    "epsilon_high": _renamed("loss.clip_high"),
    "delta": _renamed("loss.dual_clip"),
    "importance_sampling_level": _one_of("loss.type gspo for sequence", {"token": None}),
    "mask_truncated_completions": _renamed("batch.mask_truncated"),
    "reward_weights": _no_equivalent("write rewards: [{name: ..., weight: ...}] in the dataset environment"),
    "shuffle_dataset": _renamed("environments.0.shuffle"),
    "max_steps": _renamed("training_steps", "counts batches; each is batch.minibatches * batch.epochs updates"),
    "warmup_steps": _renamed("policy.warmup_steps"),
    "lr_scheduler_type": _one_of(
        "policy.schedule",
        {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine", "linear": "linear"},
    ),
    "optim": _one_of(
        "policy.optimizer.type",
        {
            "adamw_torch": "adamw",
            "adamw_torch_fused": "adamw",
            "adamw_8bit": "adamw_8bit",
            "adamw_bnb_8bit": "adamw_8bit",
            "adafactor": "adafactor",
        },
    ),
    "adam_beta1": _renamed("policy.optimizer.beta1"),
    "adam_beta2": _renamed("policy.optimizer.beta2"),
    "adam_epsilon": _renamed("policy.optimizer.eps"),
    "weight_decay": _renamed("policy.optimizer.weight_decay"),
    "max_grad_norm": _renamed("policy.grad_clip"),
    "bf16": _one_of("policy.compute_dtype", {True: "bfloat16", False: None}),
    "fp16": _one_of("policy.compute_dtype bfloat16 or float32", {False: None}),
    "gradient_checkpointing": _renamed("policy.gradient_checkpointing"),
    "use_vllm": _one_of("vLLM always generates", {True: None}),
    "vllm_mode": _one_of("the engine lives in the trainer's process", {"colocate": None}),
    "vllm_enable_sleep_mode": _renamed("engine.sleep"),
    "vllm_gpu_memory_utilization": _renamed("engine.gpu_memory_utilization"),
    "vllm_max_model_length": _renamed("engine.max_model_len"),
    "vllm_tensor_parallel_size": _renamed("engine.tensor_parallel_size"),
    "vllm_importance_sampling_correction": _one_of("loss.correction.mode", {True: None, False: "off"}),
    "vllm_importance_sampling_mode": Alias(_sampler_correction, "loss.correction"),
    "vllm_importance_sampling_clip_max": _renamed("loss.correction.cap"),
    "vllm_importance_sampling_cap": _renamed("loss.correction.cap"),
    "vllm_importance_sampling_clip_min": _renamed("loss.correction.floor"),
    "save_steps": _renamed("checkpoint.every"),
    "save_total_limit": _renamed("checkpoint.keep_last"),
    "eval_steps": _renamed("evaluation.every"),
    "logging_steps": _not_needed("every step is logged"),
    "report_to": Alias(_report_to, "tracking"),
    "per_device_train_batch_size": _no_equivalent(
        "rollout.prompts_per_step counts prompts over all ranks, batch.max_tokens_per_micro_batch sizes one forward"
    ),
    "gradient_accumulation_steps": _no_equivalent("it follows from batch.max_tokens_per_micro_batch"),
    "steps_per_generation": _no_equivalent("set rollout.prompts_per_step and batch.minibatches"),
    "num_train_epochs": _no_equivalent("set training_steps"),
    # names that count completions
    "generation_batch_size": Alias(_completions, "rollout.prompts_per_step", "completions, over all ranks"),
    "batch_size": Alias(_completions, "rollout.prompts_per_step", "completions, over all ranks"),
}

_RENAMED_SECTIONS = {"fsdp": "fsdp_config"}
_SECTIONS = sorted({name.split(".")[0] for name in ALIASES if "." in name})


def new_names() -> dict[str, str]:
    """Old dotted name -> the name to suggest for it."""
    return {old: alias.new_name for old, alias in ALIASES.items() if alias.new_name}


def translate_aliases(tree: dict[str, Any], origins: dict[Path, Origin]) -> list[str]:
    """Replace old names in `tree` by new ones, in place. Returns notes. A new name on the command line wins."""
    for old, new in _RENAMED_SECTIONS.items():
        _rename_section(tree, origins, old, new)
    problems = [
        f"{name}={show(tree[name])}: must be a mapping of settings"
        for name in _SECTIONS
        if name in tree and not isinstance(tree[name], dict)
    ]
    if problems:
        raise ConfigError(*problems)
    plain: list[str] = []
    notes: list[str] = []
    for pattern, alias in ALIASES.items():
        for path in _uses(pattern, tree):
            try:
                values = _translate_one(tree, origins, path, alias)
            except ValueError as rule:
                problems.append(f"{dotted(path)}={show(lookup(tree, path))}: {rule}{place_of(path, origins)}")
                continue
            if len(values) == 1 and not alias.remark:
                plain += [f"{dotted(path)} -> {next(iter(values))}"]
            else:
                notes += [_note(path, values, alias)]
    for name in _SECTIONS:
        leftover = tree.pop(name, {}) if not problems else {}
        known = ", ".join(old.split(".")[1] for old in ALIASES if old.startswith(f"{name}."))
        problems += [f"{name}.{key}: unknown key; valid: {known}{place_of((name, key), origins)}" for key in leftover]
    if problems:
        raise ConfigError(*problems)
    return ([f"old names read as new ones: {', '.join(plain)}"] if plain else []) + notes


def _note(path: Path, values: Mapping[str, Any], alias: Alias) -> str:
    what = ", ".join(f"{name}={show(value)}" for name, value in values.items())
    remark = f" ({alias.remark})" if alias.remark else ""
    return f"{dotted(path)}: {f'read as {what}' if values else 'nothing to set'}{remark}"


def _uses(pattern: str, tree: dict[str, Any]) -> list[Path]:
    *section, name = pattern.split(".")
    holder = tree.get(section[0], {}) if section else tree
    names = list(holder) if name == "*" else [name] if name in holder else []
    return [(*section, found) for found in names]


def _translate_one(tree: dict[str, Any], origins: dict[Path, Origin], path: Path, alias: Alias) -> dict[str, Any]:
    origin = origins.get(path, Origin(where="config file"))  # a key merged in by a YAML anchor has no line
    values = alias.translate(str(path[-1]), lookup(tree, path), lambda name: lookup(tree, tuple(name.split("."))))
    for name, value in values.items():
        new_path: Path = tuple(int(step) if step.isdigit() else step for step in name.split("."))
        taken = origins.get(new_path)
        if taken and taken.on_command_line == origin.on_command_line:
            raise ValueError(f"the same setting as {name} ({taken}); keep one of them")
        if taken and taken.on_command_line:
            continue
        place(tree, new_path, value)
        origins[new_path] = Origin(
            where=origin.where, on_command_line=origin.on_command_line, text=origin.text, old_name=dotted(path)
        )
    remove(tree, path)
    return values


def _rename_section(tree: dict[str, Any], origins: dict[Path, Origin], old: str, new: str) -> None:
    if old not in tree:
        return
    if new in tree:
        raise ConfigError(f"{old}: the same section as {new}; keep one of them{place_of((old,), origins)}")
    tree[new] = tree.pop(old)
    for path in [path for path in origins if path[0] == old]:
        origins[new, *path[1:]] = origins.pop(path)
