"""Names that other trainers use for our settings, and the code that applies them.

Sources: the co-located ToSSim trainer's YAML (here), TRL and Atropos' example trainer (in files of their own). A name
is understood only when its meaning is exact; one without an equivalent says what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colocated_grpo.config.alias_kinds import Alias, Lookup, no_equivalent, not_needed, one_of, renamed, unless_null
from colocated_grpo.config.atropos_names import ATROPOS
from colocated_grpo.config.errors import ConfigError, KeyPath, Origin, dotted, path_of, place_of, show
from colocated_grpo.config.schema import EngineConfig, RolloutConfig
from colocated_grpo.config.tree import lookup, place, remove
from colocated_grpo.config.trl_names import TRL


def _engine_argument(key: str, value: Any, _look: Lookup) -> dict[str, Any]:
    if key == "enable_sleep_mode":
        return {"engine.sleep": value}
    is_field = key in EngineConfig.model_fields and key != "args"
    return {f"engine.{key}" if is_field else f"engine.args.{key}": value}


@unless_null
def _completions(_key: str, value: Any, look: Lookup) -> dict[str, Any]:
    group_size = look("rollout.group_size") or RolloutConfig().group_size
    if not isinstance(value, int) or not isinstance(group_size, int) or value % group_size:
        raise ValueError(f"counts completions, so it must be a multiple of rollout.group_size={show(group_size)}")
    return {"rollout.prompts_per_step": value // group_size}


_SCALE = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}
_GAME = "it belongs to a game: see args of environments with type: turns"

# Applied from top to bottom: batch sizes, which count completions, come after every name of the group size.
ALIASES: dict[str, Alias] = {
    # ToSSim co-located trainer
    "model_name": renamed("model.name"),
    "vllm_config.*": Alias(_engine_argument, "engine"),
    "fsdp_config.sharding_strategy": one_of("FSDP2", {"full_shard": None}, "shards are always full"),
    "fsdp_config.cpu_offload": renamed("policy.cpu_offload"),
    "fsdp_config.mixed_precision": one_of(
        "policy.compute_dtype", {True: None, False: "float32"}, "true is the default: bfloat16 on CUDA"
    ),
    "fsdp_config.activation_checkpointing": renamed("policy.gradient_checkpointing"),
    "fsdp_config.use_orig_params": not_needed("FSDP2 always keeps the original parameters"),
    "fsdp_config.sync_state": not_needed("every rank loads the same checkpoint"),
    "fsdp_config.checkpoint_dir": renamed("output_dir"),
    "max_iterations": renamed("training_steps"),
    "max_ticks": renamed("training_steps"),
    "sync_every": renamed("sync_frequency"),
    "min_learning_rate": renamed("policy.min_lr"),
    "gradient_clip_norm": renamed("policy.grad_clip"),
    "warmup_ticks": renamed("policy.warmup_steps"),
    "max_tokens": renamed("rollout.max_completion_tokens"),
    "max_tokens_per_gen": renamed("rollout.max_completion_tokens"),
    "k_per_prompt": renamed("rollout.group_size"),
    "log_interval": not_needed("every step is logged"),
    "log_ticks": not_needed("every step is logged"),
    "csv_path": not_needed("metrics go to metrics.jsonl in the run folder"),
    "sample_log_interval": not_needed("tracking.rollouts_per_step rollouts of every step go to rollouts.jsonl"),
    "sample_log_path": not_needed("sampled rollouts go to rollouts.jsonl in the run folder"),
    "max_think_tokens": no_equivalent("rollout.max_completion_tokens bounds the whole completion"),
    "early_stop_parse_rate": no_equivalent("see stop_at_parse_rate of environments with type: turns"),
    "early_stop_consecutive_ticks": no_equivalent("see stop_after of environments with type: turns"),
    "quant_mode": no_equivalent("policy.compute_dtype sets the training type, engine.args.quantization the engine's"),
    "output_hub_repo": no_equivalent("upload final_model/ after the run"),
    "verbosity_penalty": no_equivalent(_GAME),
    "num_games": no_equivalent(_GAME),
    "num_concurrent_games": no_equivalent(_GAME),
    "active_seats_per_game": no_equivalent(_GAME),
    # both
    "learning_rate": renamed("policy.lr"),
    "beta": renamed("loss.kl.coef"),
    "temperature": renamed("rollout.temperature"),
    "top_p": renamed("rollout.top_p"),
    "top_k": renamed("rollout.top_k"),
    "min_p": renamed("rollout.min_p"),
    "repetition_penalty": renamed("rollout.repetition_penalty"),
    "loss_type": renamed("loss.type"),
    "scale_rewards": one_of("advantage.scale", _SCALE),
    **TRL,
    **ATROPOS,
    # names that count completions
    "generation_batch_size": Alias(_completions, "rollout.prompts_per_step", "completions, over all ranks"),
    "batch_size": Alias(_completions, "rollout.prompts_per_step", "completions, over all ranks"),
}

_RENAMED_SECTIONS = {"fsdp": "fsdp_config"}
_VERL_SECTIONS = ("actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "data", "trainer")
_SECTIONS = sorted({name.split(".")[0] for name in ALIASES if "." in name})


def new_names() -> dict[str, str]:
    """Old dotted name -> the name to suggest for it: the new one, or its own where no single setting follows."""
    return {old: alias.new_name if alias.names_a_setting else old for old, alias in ALIASES.items()}


def translate_aliases(tree: dict[str, Any], origins: dict[KeyPath, Origin]) -> list[str]:
    """Replace old names in `tree` by new ones, in place. Returns notes. A new name on the command line wins."""
    for name in (*_RENAMED_SECTIONS, *_SECTIONS):
        if not tree.get(name, True):  # null, "" or []: how others write that there is nothing in it
            del tree[name]
    for old, new in _RENAMED_SECTIONS.items():
        _rename_section(tree, origins, old, new)
    problems = [
        f"{name}={show(tree[name])}: must be a mapping of settings"
        for name in _SECTIONS
        if name in tree and not isinstance(tree[name], dict)
    ]
    problems += [
        f"{name}: a section of verl's; docs/guides/from_verl.md has its names here{place_of((name,), origins)}"
        for name in _VERL_SECTIONS
        if name in tree
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


def _note(path: KeyPath, values: Mapping[str, Any], alias: Alias) -> str:
    what = ", ".join(f"{name}={show(value)}" for name, value in values.items())
    remark = f" ({alias.remark})" if alias.remark else ""
    return f"{dotted(path)}: {f'read as {what}' if values else 'nothing to set'}{remark}"


def _uses(pattern: str, tree: dict[str, Any]) -> list[KeyPath]:
    *section, name = pattern.split(".")
    holder = tree.get(section[0], {}) if section else tree
    names = list(holder) if name == "*" else [name] if name in holder else []
    return [(*section, found) for found in names]


def _translate_one(tree: dict[str, Any], origins: dict[KeyPath, Origin], path: KeyPath, alias: Alias) -> dict[str, Any]:
    origin = origins.get(path, Origin(where="config file"))  # a key merged in by a YAML anchor has no line
    values = alias.translate(str(path[-1]), lookup(tree, path), lambda name: lookup(tree, path_of(name)))
    for name, value in values.items():
        new_path = path_of(name)
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


def _rename_section(tree: dict[str, Any], origins: dict[KeyPath, Origin], old: str, new: str) -> None:
    if old not in tree:
        return
    if new in tree:
        raise ConfigError(f"{old}: the same section as {new}; keep one of them{place_of((old,), origins)}")
    tree[new] = tree.pop(old)
    for path in [path for path in origins if path[0] == old]:
        origins[new, *path[1:]] = origins.pop(path)
