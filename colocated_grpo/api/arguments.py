"""Translates Trainer's arguments to settings, keyed by path. These settings override the settings of a config file."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from colocated_grpo.api import objects
from colocated_grpo.environments.rows import dataset, readers
from colocated_grpo.settings import config_file, sources
from colocated_grpo.settings.errors import ConfigError, KeyPath, parse_path, show
from colocated_grpo.settings.schema import Config, EvaluationConfig

Settings = dict[KeyPath, object]
_ENTRY: KeyPath = ("environments", 0)
"""The environment entry that is set by arguments for data and rewards, and by TRL's names."""
_FOREIGN = {
    "reward_processing_classes": "a reward model is given by its folder or name, and read with its own tokenizer",
    "tokenizer": "give it as processing_class",
    "optimizers": "see policy.optimizer and policy.schedule",
    "quantization_config": "a base of 4 bits is nf4: bnb_4bit_quant_type, or policy.lora.base_dtype",
    "tools": "an episode calls tools: docs/guides/from_trl.md#tools-and-environments",
    "rollout_func": "write an episode: docs/guides/episodes.md",
    "environment_factory": "an episode plays it: docs/guides/from_trl.md#tools-and-environments",
    "resume": "an argument of train() and check()",
    "dataset": "give the rows as train_dataset",
}
"""Argument of TRL's GRPOTrainer, of verifiers or of another method, that is rejected -> alternative."""
_ARGUMENTS = ("reward_funcs", "train_dataset", "eval_dataset", "eval_datasets", "processing_class", "peft_config")
_MISSING = {
    "environments.0.name: required, but not given": "train_dataset: required, but not given",
    "environments.0.rewards: required, but not given": "reward_funcs: required, but not given",
}
"""Error line about a setting -> line about the argument that sets it."""
_GEOMETRY = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
_DEVICE = ("use_cpu", "bf16")
"""Fields of GRPOConfig that have no effect here. On some machines, GRPOConfig itself rejects their defaults."""
_CLIP_MAX = "vllm_importance_sampling_clip_max"
_RLOO = {"advantage.leave_one_out": True, "advantage.scale": "none", "loss.type": "dr_grpo", "loss.kl.estimator": "k2"}
_DEFAULTS_NOTE = (
    "fields with GRPOConfig's defaults have this trainer's: docs/guides/from_trl.md#different-defaults-and-meanings"
)
_RLOO_NOTE = (
    "RLOOConfig: trained with loss.type=dr_grpo and advantage.leave_one_out: ratios are clipped per token, not per "
    "completion, and the KL penalty is part of the loss, not of the rewards"
)
_SHARED = {"rewards", "prompt_column", "columns", "system_prompt", "tools", "chat_template_kwargs"}
"""Settings that evaluation sets copy from the training data."""
UNCOUNTED = 1 << 31
"""Placeholder for training_steps of a run whose rows are not counted yet. Above the minimum of every rule."""
_STEPS: KeyPath = ("training_steps",)
_NEEDS_ROWS = "needs a train_dataset of rows as the only environment"


def read_arguments(
    *,
    model: object,
    reward_funcs: object,
    train_dataset: object,
    eval_datasets: object,
    args: object,
    processing_class: object,
    peft_config: object,
    config: str | Path | None,
    settings: Mapping[str, object],
) -> config_file.LoadedConfig:
    """Return the run's settings, with the program's objects attached. Raises ConfigError."""
    holds_all = isinstance(model, Mapping) and bool(model.keys() & Config.model_fields)
    if holds_all or not (config is None or objects.is_name(config)):
        rule = "model: must be the model alone" if holds_all else "config: must be the path of a YAML file"
        raise ConfigError(f"{rule}; give settings by keyword, Trainer(**settings), or as Trainer(args=settings)")
    by_name: objects.ObjectsByName = {}
    notes = [_DEFAULTS_NOTE] if hasattr(args, "generation_batch_size") else []
    given = {**_from_args(args), **_without_foreign(settings)}
    if "advantage.leave_one_out" in given and not isinstance(args, Mapping):
        notes.append(_RLOO_NOTE)
    if getattr(peft_config, "peft_type", "LORA") != "LORA":
        raise ConfigError(f"peft_config: of type {type(peft_config).__name__}; must be a LoraConfig, or a mapping")
    if peft_config is not None:
        given["peft_config"] = changed_fields(peft_config, "peft_config", "LoraConfig")
    if model is not None and not objects.is_name(model) and not isinstance(model, Mapping):
        model = objects.model_settings(model)
        notes.append(f"model: every rank reads the files of {model['name']}; the object is not used")
    if model is not None:
        given["model"] = model
    if "environments" in given:
        given["environments"] = objects.take_environments(given["environments"], by_name)
    held_out = given.pop("eval_dataset", None)  # TRL's name
    if held_out is not None and eval_datasets is not None:
        raise ConfigError("eval_dataset: the same setting as eval_datasets; remove one of them")
    held_out = eval_datasets if held_out is None else held_out
    by_path = dict(_flat(plain(given)))
    entries = by_path.get(("environments",))
    first = entries[0] if isinstance(entries, list) and entries else None
    for name, value, setting in (("train_dataset", train_dataset, "name"), ("reward_funcs", reward_funcs, "rewards")):
        if value is not None and isinstance(first, Mapping) and first.get(setting):
            raise ConfigError(f"{name}: the same setting as environments.0.{setting}; remove one of them")
    several = held_out if isinstance(held_out, Mapping) else None
    by_path |= _data(train_dataset, held_out if several is None else None, by_name)
    if reward_funcs is not None:
        by_path[*_ENTRY, "rewards"] = objects.take_rewards(reward_funcs, "reward_funcs", by_name)
        if config is None and ("environments",) not in by_path:
            by_path[*_ENTRY, "type"] = "dataset"  # so that a missing dataset is what the error names
    epochs = take_epochs(by_path, getattr(args, "num_train_epochs", None))
    length = {} if epochs is None else {"training_steps": UNCOUNTED}
    if several is not None:
        # Read the settings without the evaluation sets first. keep_best may name a metric of a set.
        nothing_kept = {("evaluation", "keep_best"): None, ("evaluation", "patience"): None}
        alone = _loaded(config, by_path | nothing_kept, by_name, length)
        by_path |= evaluation_sets(several, alone.config.environments[0], alone.config.evaluation, by_name)
    loaded = _loaded(config, by_path, by_name, length)
    if epochs is not None and not (epochs[1] and loaded.config.training_steps != UNCOUNTED):
        steps, note = in_steps(*epochs, loaded.config.environments, loaded.config.rollout.prompts_per_step)
        by_path |= steps
        loaded = _loaded(config, by_path, by_name, {})
        notes.append(note)
    prompts = loaded.config.training_steps * loaded.config.rollout.prompts_per_step
    if streams := objects.read_streams(by_name, prompts + dataset.MAX_HELD_OUT, loaded.config.evaluation.prompts):
        loaded = _loaded(config, by_path, by_name, {})
        notes += streams
    loaded = dataclasses.replace(loaded, notes=[*loaded.notes, *notes])
    return loaded if processing_class is None else objects.with_tokenizer(loaded, processing_class)


def _loaded(
    config: str | Path | None, settings: Settings, by_name: objects.ObjectsByName, defaults: Mapping[str, object]
) -> config_file.LoadedConfig:
    try:
        loaded = config_file.build_config(config, settings, defaults)
    except ConfigError as error:
        raise ConfigError(*(_MISSING.get(line, line) for line in str(error).splitlines())) from None
    sources.give_objects(loaded.config.environments, by_name)
    sources.give_objects([entry.source for entry in loaded.config.evaluation.sets], by_name)
    return loaded


def _without_foreign(settings: Mapping[str, object]) -> dict[str, object]:
    quantized = settings.get("quantization_config")
    if getattr(quantized, "load_in_4bit", False) and getattr(quantized, "bnb_4bit_quant_type", None) == "nf4":
        settings = {**settings, "quantization_config": None, "load_in_4bit": True}
    foreign = {name: value for name, value in settings.items() if name in _FOREIGN}
    if wrong := [name for name, value in foreign.items() if (any(value) if isinstance(value, list | tuple) else value)]:
        raise ConfigError(*(f"{name}: {_FOREIGN[name]}" for name in wrong))
    for name in sorted(settings.keys() - {*_ARGUMENTS}):
        if near := get_close_matches(name, (*_ARGUMENTS, "callbacks"), n=1, cutoff=0.85):
            raise ConfigError(f"{name}: unknown argument; did you mean {near[0]}?")
    return {name: value for name, value in settings.items() if name not in _FOREIGN}


def _data(train: object, held_out: object, by_name: objects.ObjectsByName) -> Settings:
    settings: Settings = {}
    if train is not None:
        settings[*_ENTRY, "type"] = "dataset"
        settings[*_ENTRY, "name"] = objects.take_rows(train, "train_dataset", sources.TRAIN_DATASET, by_name)
    if held_out is not None:
        if objects.is_name(held_out) and not objects.is_name(train or ""):
            raise ConfigError(f"eval_datasets={held_out!r}: must be rows, as train_dataset is")
        settings[*_ENTRY, "eval_split"] = objects.take_rows(held_out, "eval_datasets", sources.EVAL_DATASETS, by_name)
    return settings


def _from_args(args: Any) -> dict[str, object]:
    """Return the settings in `args`: a mapping, or an object of TRL's GRPOConfig."""
    if args is None or isinstance(args, Mapping):
        return dict(args or {})
    settings = changed_fields(args, "args", "GRPOConfig")
    kind = _library_class(args).__name__
    if hasattr(args, "max_steps") and kind not in ("GRPOConfig", "RLOOConfig"):
        raise ConfigError(f"args: of type {kind}; give TRL's GRPOConfig or RLOOConfig (docs/guides/losses.md)")
    if not hasattr(args, "generation_batch_size"):
        return settings
    # GRPOConfig has already combined these fields into others; scripts pass resume_from_checkpoint to train().
    unused = {*_GEOMETRY, "resume_from_checkpoint", "vllm_importance_sampling_cap"}
    if args.max_steps <= 0:  # as in TRL, the run's length is then in epochs
        unused.add("max_steps")
    if not args.push_to_hub:  # push_to_hub() of the trainer reads them
        unused |= {"hub_model_id", "hub_private_repo"}
    if settings.pop("fsdp_config", None):
        settings["fsdp"] = args.fsdp
    if any(name.startswith("vllm_importance_sampling_") for name in settings):  # a bound belongs to a mode
        settings["vllm_importance_sampling_mode"] = args.vllm_importance_sampling_mode
        settings[_CLIP_MAX] = getattr(args, _CLIP_MAX, getattr(args, "vllm_importance_sampling_cap", None)) or 1e30
    if kind == "RLOOConfig":
        settings = {"num_generations": args.num_generations, "beta": args.beta, **_RLOO, **settings}
    return {name: value for name, value in settings.items() if name not in unused} | _batch_sizes(args)


def _batch_sizes(args: Any) -> dict[str, object]:
    """Return the completions and optimizer steps of a batch. Generations between two updates are one batch here."""
    generations, rest = divmod(args.gradient_accumulation_steps, args.steps_per_generation)
    if generations and not rest:
        return {"generation_batch_size": args.generation_batch_size * generations}
    minibatches, rest = divmod(args.steps_per_generation, args.gradient_accumulation_steps)
    if rest:
        rule = f"must be a multiple or a divisor of gradient_accumulation_steps={args.gradient_accumulation_steps}"
        raise ConfigError(f"steps_per_generation={args.steps_per_generation}: {rule}")
    return {"generation_batch_size": args.generation_batch_size, "batch": {"minibatches": minibatches}}


def changed_fields(settings: object, argument: str, kind: str) -> dict[str, object]:
    """Return a mapping unchanged; for a dataclass, such as GRPOConfig, the fields that differ from defaults."""
    if isinstance(settings, Mapping):
        return dict(settings)
    if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
        raise ConfigError(f"{argument}={show(settings)}: must be a mapping of settings or {kind}")
    same = {name: getattr(settings, name) for name in _DEVICE if hasattr(settings, name)}
    known: Any = _library_class(settings)
    default = known(**same)
    pairs = [(field.name, getattr(settings, field.name)) for field in dataclasses.fields(known) if field.init]
    return {name: value for name, value in pairs if value != getattr(default, name)}


def _library_class(settings: object) -> type:
    """Return the class of TRL or PEFT that a program's class extends: the program itself reads fields that it adds."""
    theirs = (each for each in type(settings).__mro__ if each.__module__.startswith(("trl.", "peft.")))
    return next(theirs, type(settings))


def plain(value: object) -> Any:
    """Return a value in the form of a config file: paths and enums as text, tuples and sets as lists."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    return [*map(plain, value)] if isinstance(value, list | tuple) else value


def _flat(tree: Mapping[str, object], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yield settings by path, equally for {'policy': {'lr': 1}} and {'policy.lr': 1}. Lists are values."""
    for name, value in tree.items():
        path = (*prefix, *(parse_path(name) if isinstance(name, str) and not prefix else (name,)))
        if isinstance(value, Mapping) and value:
            yield from _flat(value, path)
        else:
            yield path, value


def evaluation_sets(
    datasets: Mapping[object, object], entry: object, evaluation: EvaluationConfig, by_name: objects.ObjectsByName
) -> Settings:
    """Return settings that add each dataset as an evaluation set, with the rewards, columns and template of `entry`.

    No training rows are held out unless `entry`, the training data, sets held_out or eval_split. Raises ConfigError.
    """
    if not isinstance(entry, sources.DatasetSourceConfig):
        raise ConfigError(f"{sources.EVAL_DATASETS}: needs a train_dataset, whose columns and rewards they share")
    if not datasets:
        raise ConfigError(f"{sources.EVAL_DATASETS}={{}}: must have an entry, or be left out")
    shared = entry.model_dump(mode="json", include=_SHARED)
    common = {"samples": evaluation.samples_per_prompt, "temperature": evaluation.temperature}
    sets = [each.model_dump(mode="json") for each in evaluation.sets]
    for name, rows in datasets.items():
        key = f"{sources.EVAL_DATASETS}[{name}]"
        if objects.is_name(rows) and Path(rows).suffix.lower() not in sources.DATA_SUFFIXES:
            rule = f"must be rows or a file ({', '.join(sources.DATA_SUFFIXES)})"
            advice = "write a dataset of the Hub in evaluation.sets, with its split"
            raise ConfigError(f"{key}={str(rows)!r}: {rule}; {advice}")
        source = {"type": "dataset", "name": objects.take_rows(rows, key, key, by_name), **shared}
        sets.append({"name": str(name), "source": source, **common})
    settings: Settings = {("evaluation", "sets"): sets}
    if entry.held_out is None and entry.eval_split is None:
        settings["environments", 0, "held_out"] = 0
    return settings


def take_epochs(settings: Settings, default: float | None) -> tuple[float, bool] | None:
    """Remove num_train_epochs from a program's settings. Return it, and True if it is only GRPOConfig's default.

    Return None if the program sets steps, or neither. default: that of GRPOConfig, if used. Raises ConfigError.
    """
    number = settings.pop(("num_train_epochs",), None)
    if settings.keys() & {_STEPS, ("max_steps",)}:
        return None
    if number is None:
        return None if default is None else (default, True)
    if not isinstance(number, int | float) or not 0 < number < math.inf:
        raise ConfigError(f"num_train_epochs={number!r}: must be a number above 0")
    return number, False


def in_steps(epochs: float, by_default: bool, environments: Sequence[object], prompts: int) -> tuple[Settings, str]:
    """Return `training_steps` for these epochs, and a note. If rows have no count: none, or ConfigError if explicit."""
    entry, *others = environments
    shown = f"num_train_epochs={epochs:g}"
    if others or (rows := num_rows(entry)) is None:
        if not by_default:
            raise ConfigError(f"{shown}: {_NEEDS_ROWS}; or set training_steps")
        steps = Config.model_fields["training_steps"].default
        return {}, f"training_steps={steps}: the default; {shown} {_NEEDS_ROWS}; set max_steps"
    steps = max(1, math.ceil(rows * epochs / prompts))
    return {_STEPS: steps}, f"training_steps={steps}: {shown} over {rows} rows, {prompts} prompts a step"


def num_rows(entry: object) -> int | None:
    """Return the number of training rows that a program gave: kept by filters and not held out. None: no count."""
    if not isinstance(entry, sources.DatasetSourceConfig) or entry.given is None or objects.is_stream(entry.given):
        return None
    kept, _ = readers.filter_rows(entry.given, entry, "environments.0")
    return len(kept) - (dataset.num_held_out(entry.held_out, len(kept)) if entry.eval_split is None else 0)
