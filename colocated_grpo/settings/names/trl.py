"""Setting names of TRL 1.16, and the kinds of entries of such tables.

A name is translated only if its meaning is exactly the same: docs/guides/from_trl.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from colocated_grpo.settings.errors import show
from colocated_grpo.settings.sources import reward_name
from colocated_grpo.types import JsonObject

Lookup = Callable[[str], Any]
"""Returns the value at a dotted path of the settings translated so far, or None."""
NewSettings = JsonObject
"""Values by new dotted name."""
Translate = Callable[[str, Any, Lookup], NewSettings]
"""Maps (last part of the old name, value, lookup) to new settings. Raises ValueError with the violated rule."""


@dataclass(frozen=True)
class Alias:
    translate: Translate
    new_name: str = ""
    """Setting that is suggested for a misspelled old name. If it is no setting's name, the old name is suggested."""
    remark: str = ""
    """Appended to the note that reports the translation."""
    reads_null: bool = False
    """False: null sets nothing, as other trainers use null for the default."""


def renamed(new_name: str, remark: str = "", also: Mapping[str, object] = {}) -> Alias:
    """Return an alias that passes its value unchanged to the setting `new_name`. also: further settings."""
    return Alias(lambda _key, value, _get: {**also, new_name: value}, new_name, remark)


def renames(section: str, pairs: str) -> dict[str, Alias]:
    """Return aliases for settings of a section. pairs: 'setting=old_name', or 'setting' if the old name is the same."""
    names = (pair.partition("=") for pair in pairs.split())
    return {old or new: renamed(f"{section}.{new}") for new, _, old in names}


def one_of(new_name: str, values: Mapping[Any, object], remark: str = "", instead: str = "") -> Alias:
    """Return an alias that accepts the keys of `values` and sets `new_name` to the mapped value; None sets nothing.

    If all mapped values are None, `new_name` explains why only these keys are accepted. instead: shown in its place.
    """

    def translate(_key: str, value: object, _get: Lookup) -> NewSettings:
        key = value.lower() if isinstance(value, str) else value
        if isinstance(key, dict | list) or key not in values:
            accepted = ", ".join(show(known) for known in values)
            way = f"; set {instead}" if instead else f" ({new_name})"
            raise ValueError(f"must be {'one of ' if len(values) > 1 else ''}{accepted}{way}")
        return {} if values[key] is None else {new_name: values[key]}

    return Alias(translate, new_name, remark)


def not_needed(why: str) -> Alias:
    """Return an alias that is accepted with any value and sets nothing."""
    return Alias(lambda _key, _value, _get: {}, remark=why)


def not_supported(instead: str) -> Alias:
    """Return an alias that accepts only null, false and empty values. `instead` says what to do."""

    def translate(_key: str, value: object, _get: Lookup) -> NewSettings:
        if value:
            raise ValueError(f"not supported; {instead}")
        return {}

    return Alias(translate, remark="off")


def each(names: str, alias: Alias, section: str = "") -> dict[str, Alias]:
    """Return a dictionary with the same alias under each name. names: separated by spaces. section: "" or "name."."""
    return {section + name: alias for name in names.split()}


# TRL


def _epsilon(_key: str, value: object, get: Lookup) -> NewSettings:
    has_upper_bound = get("epsilon_high") is not None or get("loss.clip_high") is not None
    return {"loss.clip_low": value} | ({} if has_upper_bound else {"loss.clip_high": value})


def _sampler_correction(_key: str, value: object, get: Lookup) -> NewSettings:
    modes = [f"{level}_{mode}" for level in ("token", "sequence") for mode in ("truncate", "mask")]
    if value not in modes:
        raise ValueError(f"must be one of {', '.join(modes)}")
    level, mode = value.split("_")
    off = get("loss.correction.mode") == "off"
    return {"loss.correction.level": level} | ({} if off else {"loss.correction.mode": mode})


_OTHER_TRACKERS = ("clearml", "codecarbon", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "trackio")


def _report_to(_key: str, value: object, _get: Lookup) -> NewSettings:
    trackers = {"wandb": {"tracking.wandb": "online"}, "tensorboard": {"tracking.tensorboard": True}, "none": {}}
    trackers |= {name: {} for name in _OTHER_TRACKERS}
    names = value if isinstance(value, list) else [value]
    if any(name not in trackers for name in names):
        raise ValueError(f"must be one of these, or a list of them: {', '.join(trackers)}")
    return {path: setting for name in names for path, setting in trackers[name].items()}


def _kept_checkpoints(_key: str, value: object, _get: Lookup) -> NewSettings:
    if value is None:
        raise ValueError("TRL keeps every checkpoint then; set the number to keep (checkpoint.keep_last)")
    return {"checkpoint.keep_last": value}


_EPOCHS = "set training_steps: rows * epochs / rollout.prompts_per_step"


def _max_steps(_key: str, value: object, _get: Lookup) -> NewSettings:
    if value == -1:
        raise ValueError(f"TRL uses num_train_epochs then; {_EPOCHS}")
    return {"training_steps": value}


def _epochs(_key: str, _value: object, get: Lookup) -> NewSettings:
    if get("max_steps") is None and get("training_steps") is None:
        raise ValueError(f"not supported; {_EPOCHS}")
    return {}


_REWARD_MODEL = "reward_model_name_or_path"


def _reward_funcs(_key: str, value: object, get: Lookup) -> NewSettings:
    """Convert reward_funcs of TRL's script (dotted paths or short names), after a reward model, to its `rewards`."""
    model = get(_REWARD_MODEL)
    entries = [*([model] if model else []), *(value if isinstance(value, list) else [value])]
    rewards = [entry if isinstance(entry, dict) else {"name": entry} for entry in entries]
    return {"environments.0.rewards": [{**reward, "name": reward_name(reward.get("name"))} for reward in rewards]}


def _reward_model(_key: str, value: object, get: Lookup) -> NewSettings:
    """Set the only reward, unless the translation of `reward_funcs`, which comes first, has the model."""
    rewards, reward = get("environments.0.rewards"), {"name": value}
    return {} if isinstance(rewards, list) and reward in rewards else {"environments.0.rewards": [reward]}


def _reward_weights(_key: str, value: object, get: Lookup) -> NewSettings:
    rewards = get("environments.0.rewards")
    if not isinstance(rewards, list) or not all(isinstance(reward, dict) for reward in rewards):
        raise ValueError("needs reward_funcs; or write rewards: [{name: ..., weight: ...}] in the dataset environment")
    if not isinstance(value, list) or len(value) != len(rewards):
        raise ValueError(f"needs one number for each of the {len(rewards)} rewards")
    if any("weight" in reward for reward in rewards):
        raise ValueError("one of the rewards has a weight of its own; remove one of them")
    return {f"environments.0.rewards.{index}.weight": weight for index, weight in enumerate(value)}


def _sampling_level(_key: str, value: object, get: Lookup) -> NewSettings:
    """Accept what the loss does already; the translation of `loss_type` comes first."""
    if value != "token" and (value, get("loss.type")) != ("sequence", "gspo"):
        raise ValueError("must be token, or sequence with loss_type: grpo, which is loss.type: gspo")
    return {}


def _push_to_hub(_key: str, value: object, get: Lookup) -> NewSettings:
    """Name the repository as TRL does: like the output folder, unless hub_model_id names it."""
    named = not value or get("hub_model_id") or get("hub.repo")
    return {} if named else {"hub.repo": PurePath(str(get("output_dir") or "trainer_output")).name}


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")


def _generation(key: str, value: object, _get: Lookup) -> NewSettings:
    if key not in _SAMPLING:
        raise ValueError(f"not supported; must be one of {', '.join(_SAMPLING)}, as in rollout")
    return {f"rollout.{key}": [value] if key == "stop" and isinstance(value, str) else value}


_GUIDE = "see docs/guides/from_trl.md"
_STEPS_OR_NO = {"steps": None, "no": 0, False: 0}
_LOADING = "attn_implementation device_map dtype low_cpu_mem_usage torch_dtype use_cache use_kernels"
_SET_WITHOUT_EFFECT = """
accelerator_config attn_implementation auto_find_batch_size average_tokens_across_devices batch_eval_metrics
bf16_full_eval cache_implementation cast_lm_head_to_fp32 dataloader_drop_last dataloader_in_order
dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
ddp_static_graph ddp_timeout debug disable_dropout disable_tqdm do_eval do_predict do_train ds3_gather_for_generation
enable_jit_checkpoint entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target eval_accumulation_steps
eval_do_concat_batches eval_on_start eval_use_gather_object fp16_full_eval gradient_checkpointing_kwargs
greater_is_better group_by_length hub_always_push hub_strategy ignore_data_skip include_for_metrics
include_num_input_tokens_seen label_names length_column_name liger_kernel_config local_rank log_completions_hub_repo
log_level log_level_replica log_multimodal log_on_each_node log_unique_prompts logging_dir logging_first_step
logging_nan_inf_filter logging_steps logging_strategy metric_for_best_model num_completions_to_print
overwrite_output_dir pad_to_multiple_of per_device_eval_batch_size prediction_loss_only project ref_model_mixup_alpha
ref_model_sync_steps remove_unused_columns restore_callback_states_from_checkpoint sapo_temperature_neg
sapo_temperature_pos save_on_each_node save_only_model save_safetensors skip_memory_metrics tf32 torch_compile_backend
torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id
train_sampling_strategy transformers_continuous_batching_config use_cache use_cpu use_liger_kernel use_liger_loss
use_transformers_continuous_batching use_transformers_paged vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
vllm_device vllm_dtype vllm_enable_prefix_caching vllm_group_port vllm_model_impl vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout wandb_log_unique_prompts
"""

TRL: dict[str, Alias] = {
    **renames("model", "name=model_name_or_path revision=model_revision trust_remote_code chat_template_kwargs"),
    **renames("model", "revision=model_init_kwargs.revision trust_remote_code=model_init_kwargs.trust_remote_code"),
    **renames("rollout", "group_size=num_generations max_completion_tokens=max_completion_length"),
    "max_prompt_length": renamed("rollout.max_prompt_tokens", "longer prompts are dropped, not cut"),
    **renames("batch", "epochs=num_iterations mask_truncated=mask_truncated_completions"),
    **renames("evaluation", "samples_per_prompt=num_generations_eval every=eval_steps"),
    "epsilon": Alias(_epsilon, "loss.clip_low"),
    **renames("loss", "clip_high=epsilon_high dual_clip=delta"),
    "importance_sampling_level": Alias(_sampling_level, "loss.type", "part of loss_type"),
    **renames("policy", "load_balancing=router_aux_loss_coef warmup_steps warmup_steps=warmup_ratio"),
    **renames("policy", "grad_clip=max_grad_norm gradient_checkpointing compile=torch_compile"),
    **renames("policy.optimizer", "beta1=adam_beta1 beta2=adam_beta2 eps=adam_epsilon weight_decay"),
    **renames("engine", "sleep=vllm_enable_sleep_mode gpu_memory_utilization=vllm_gpu_memory_utilization"),
    **renames("engine", "max_model_len=vllm_max_model_length tensor_parallel_size=vllm_tensor_parallel_size"),
    "max_steps": Alias(_max_steps, "training_steps", "a step makes batch.minibatches * batch.epochs optimizer steps"),
    "num_train_epochs": Alias(_epochs, remark="training_steps is given and takes precedence"),
    **each(_LOADING, not_needed("master weights are float32, the forward pass bfloat16"), "model_init_kwargs."),
    "model_init_kwargs.quantization_config": not_supported("give it to the trainer, or set load_in_4bit"),
    "push_to_hub": Alias(_push_to_hub, "hub.repo"),
    "lr_scheduler_type": one_of(
        "policy.schedule",
        {"cosine": "cosine", "cosine_with_min_lr": "cosine", "linear": "linear"}
        | dict.fromkeys(("constant", "constant_with_warmup"), "constant"),
    ),
    "lr_scheduler_kwargs.min_lr": renamed("policy.min_lr"),
    "lr_scheduler_kwargs.min_lr_rate": not_supported("set policy.min_lr to this fraction of learning_rate"),
    "optim": one_of(
        "policy.optimizer.type",
        dict.fromkeys(("adamw_torch", "adamw_torch_fused", "paged_adamw", "paged_adamw_32bit"), "adamw")
        | dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit")
        | {"adafactor": "adafactor"},
    ),
    "bf16": one_of("policy.compute_dtype", {True: "bfloat16", False: None}),
    "use_vllm": one_of("vLLM always generates", {True: None}),
    "vllm_mode": one_of("vLLM", {"colocate": None, "server": None}, "the engine runs in the trainer's process"),
    "vllm_importance_sampling_correction": one_of(
        "loss.correction.mode",
        {True: None, False: "off"},
        "true truncates token ratios at 2 unless vllm_importance_sampling_mode and _clip_max are set",
    ),
    "vllm_importance_sampling_mode": Alias(_sampler_correction, "loss.correction"),
    **renames("loss.correction", "cap=vllm_importance_sampling_clip_max cap=vllm_importance_sampling_cap"),
    **renames("loss.correction", "floor=vllm_importance_sampling_clip_min"),
    "save_steps": renamed("checkpoint.every"),
    "save_strategy": one_of("checkpoint.every", _STEPS_OR_NO, "also saved at the end", "save_steps"),
    "save_total_limit": Alias(_kept_checkpoints, "checkpoint.keep_last", reads_null=True),
    "eval_strategy": one_of("evaluation.every", _STEPS_OR_NO, instead="eval_steps"),
    "report_to": Alias(_report_to, "tracking", "other trackers are not used: metrics are in the run folder"),
    "log_completions": one_of("tracking.completions_every", {True: 10, False: None}),
    **renames("hub", "repo=hub_model_id private=hub_private_repo"),
    "hub_token": not_supported("set HF_TOKEN"),
    "hub_revision": not_supported("pushes go to the repository's main branch"),
    "full_determinism": renamed("deterministic"),
    # TRL's script
    "dataset_name": renamed("environments.0.name", also={"environments.0.type": "dataset"}),
    **renames("environments.0", "subset=dataset_config split=dataset_train_split eval_split=dataset_test_split"),
    **renames("environments.0", "shuffle=shuffle_dataset"),
    "reward_funcs": Alias(_reward_funcs, "environments.0.rewards"),
    _REWARD_MODEL: Alias(_reward_model, "environments.0.rewards", "the first of the rewards"),
    "reward_weights": Alias(_reward_weights, "environments.0.rewards.0.weight"),
    # Not translated
    **each(
        "per_device_train_batch_size gradient_accumulation_steps steps_per_generation",
        not_supported(
            "set generation_batch_size to per_device_train_batch_size * gradient_accumulation_steps * GPUs; "
            "batch.max_tokens_per_micro_batch sizes the micro-batches"
        ),
    ),
    "generation_kwargs.*": Alias(_generation),
    "multi_objective_aggregation": one_of("rewards are summed before normalization", {"sum_then_normalize": None}),
    "resume_from_checkpoint": not_supported("start with --resume RUN"),
    "load_best_model_at_end": not_supported("set evaluation.keep_best, which exports best_model/"),
    **each(
        "dtype torch_dtype",
        one_of("policy.compute_dtype", {"bfloat16": None}, "of the forward pass on CUDA; master weights are fp32"),
    ),
    "teacher_model_name_or_path": not_supported("name the teacher in loss.kl.model: docs/guides/distillation.md"),
    "load_in_8bit": not_supported("base weights have 16 or 4 bits; see policy.lora.base_dtype"),
    **each(
        "data_seed datasets entropy_coef eval_delay fp16 label_smoothing_factor max_tool_calling_iterations "
        "neftune_noise_alpha normalize_advantages off_policy_mask_threshold optim_args optim_target_modules "
        "parallelism_config reward_clip_range sync_ref_model top_entropy_quantile use_adaptive_entropy "
        "use_bias_correction_kl vllm_guided_decoding_regex vllm_structured_outputs_regex",
        not_supported(_GUIDE),
    ),
    **each("deepspeed fsdp", not_needed("FSDP2 shards the weights over all ranks; see policy")),
    **each(_SET_WITHOUT_EFFECT, not_needed("no counterpart is needed here")),
}
