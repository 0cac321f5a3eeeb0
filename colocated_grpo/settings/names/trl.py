"""Setting names of TRL 1.16: its `GRPOConfig` and the arguments of its GRPO script. See docs/guides/from_trl.md.

Names of adapter settings are in `peft`.
"""

from __future__ import annotations

import os

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
from colocated_grpo.settings.sources import reward_name


@unless_null
def _epsilon(_key: str, value: object, get: Lookup) -> NewSettings:
    has_upper_bound = get("epsilon_high") is not None or get("loss.clip_high") is not None
    return {"loss.clip_low": value} | ({} if has_upper_bound else {"loss.clip_high": value})


@unless_null
def _sampler_correction(_key: str, value: object, get: Lookup) -> NewSettings:
    modes = [f"{level}_{mode}" for level in ("token", "sequence") for mode in ("truncate", "mask")]
    if value not in modes:
        raise ValueError(f"must be one of {', '.join(modes)}")
    level, mode = value.split("_")
    off = get("vllm_importance_sampling_correction") is False
    return {"loss.correction.level": level} | ({} if off else {"loss.correction.mode": mode})


def _report_to(_key: str, value: object, get: Lookup) -> NewSettings:
    trackers = {"wandb": _wandb(get), "tensorboard": {"tracking.tensorboard": True}, "none": {}}
    names = value if isinstance(value, list) else [value or "none"]
    if any(name not in trackers for name in names):
        raise ValueError(f"must be one or several of {', '.join(trackers)}")
    return {path: setting for name in names for path, setting in trackers[name].items()}


def _wandb(get: Lookup) -> NewSettings:
    """Return mode and project from W&B's environment variables, like TRL. A project in the settings takes
    precedence."""
    mode, project = os.environ.get("WANDB_MODE", "online"), os.environ.get("WANDB_PROJECT")
    in_settings = get("tracking.wandb_project") or get("wandb_project")
    named = {"tracking.wandb_project": project} if project and not in_settings else {}
    known = {"offline": "offline", "dryrun": "offline", "disabled": "off"}
    return {"tracking.wandb": known.get(mode, "online"), **named}


def _kept_checkpoints(_key: str, value: object, _get: Lookup) -> NewSettings:
    if value is None:
        raise ValueError("TRL keeps every checkpoint then; set the number to keep (checkpoint.keep_last)")
    return {"checkpoint.keep_last": value}


_EPOCHS = "set training_steps: rows * epochs / rollout.prompts_per_step"


@unless_null
def _max_steps(_key: str, value: object, _get: Lookup) -> NewSettings:
    if value == -1:
        raise ValueError(f"TRL uses num_train_epochs then; {_EPOCHS}")
    return {"training_steps": value}


@unless_null
def _epochs(_key: str, _value: object, get: Lookup) -> NewSettings:
    if get("max_steps") is None and get("training_steps") is None:
        raise ValueError(f"not supported; {_EPOCHS}")
    return {}


@unless_null
def _bias_correction_of_kl(_key: str, value: object, get: Lookup) -> NewSettings:
    if value is not False and (get("beta") or get("loss.kl.coef")):
        raise ValueError("must be false (the KL estimate is not multiplied by the ratio)")
    return {}


def _dataset_name(_key: str, value: object, _get: Lookup) -> NewSettings:
    return {"environments.0.type": "dataset", "environments.0.name": value}


def _reward_funcs(_key: str, value: object, _get: Lookup) -> NewSettings:
    """Convert reward_funcs of TRL's script (dotted paths or short names) to environments.0.rewards."""
    entries = value if isinstance(value, list) else [value]
    rewards = [entry if isinstance(entry, dict) else {"name": entry} for entry in entries]
    return {"environments.0.rewards": [{**reward, "name": reward_name(reward.get("name"))} for reward in rewards]}


@unless_null
def _reward_weights(_key: str, value: object, get: Lookup) -> NewSettings:
    rewards = get("environments.0.rewards")
    if not isinstance(rewards, list) or not all(isinstance(reward, dict) for reward in rewards):
        raise ValueError("needs reward_funcs; or write rewards: [{name: ..., weight: ...}] in the dataset environment")
    if not isinstance(value, list) or len(value) != len(rewards):
        raise ValueError(f"needs one number for each of the {len(rewards)} rewards")
    if any("weight" in reward for reward in rewards):
        raise ValueError("one of the rewards has a weight of its own; remove one of them")
    return {f"environments.0.rewards.{index}.weight": weight for index, weight in enumerate(value)}


_GEOMETRY = (
    "set generation_batch_size to per_device_train_batch_size * gradient_accumulation_steps * GPUs; "
    "batch.max_tokens_per_micro_batch sizes the micro-batches"
)
_NO_SERVER = "the engine runs in the trainer's process"
_ROLLOUTS = "tracking.rollouts_per_step rollouts of every step go to rollouts.jsonl; tools.show_rollouts prints them"
_DTYPE = "master weights are fp32; policy.compute_dtype sets the type of the forward pass"

TRL: dict[str, Alias] = {
    "model_name_or_path": renamed("model.name"),
    "trust_remote_code": renamed("model.trust_remote_code"),
    "num_generations": renamed("rollout.group_size"),
    "max_completion_length": renamed("rollout.max_completion_tokens"),
    "max_prompt_length": renamed("rollout.max_prompt_tokens", "longer prompts are dropped, not cut"),
    "num_iterations": renamed("batch.epochs"),
    "epsilon": Alias(_epsilon, "loss.clip_low"),
    "epsilon_high": renamed("loss.clip_high"),
    "delta": renamed("loss.dual_clip"),
    "importance_sampling_level": one_of("for sequence set loss.type: gspo", {"token": None}),
    "mask_truncated_completions": renamed("batch.mask_truncated"),
    "shuffle_dataset": renamed("environments.0.shuffle"),
    "max_steps": Alias(
        _max_steps, "training_steps", "counts batches of batch.minibatches * batch.epochs optimizer steps each"
    ),
    "warmup_steps": renamed("policy.warmup_steps"),
    "lr_scheduler_type": one_of(
        "policy.schedule",
        {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine", "linear": "linear"},
    ),
    "optim": one_of(
        "policy.optimizer.type",
        {
            "adamw_torch": "adamw",
            "adamw_torch_fused": "adamw",
            "adamw_8bit": "adamw_8bit",
            "adamw_bnb_8bit": "adamw_8bit",
            "adafactor": "adafactor",
        },
    ),
    "adam_beta1": renamed("policy.optimizer.beta1"),
    "adam_beta2": renamed("policy.optimizer.beta2"),
    "adam_epsilon": renamed("policy.optimizer.eps"),
    "weight_decay": renamed("policy.optimizer.weight_decay"),
    "max_grad_norm": renamed("policy.grad_clip"),
    "bf16": one_of("policy.compute_dtype", {True: "bfloat16", False: None}),
    "fp16": one_of("policy.compute_dtype is bfloat16 or float32", {False: None}),
    "gradient_checkpointing": renamed("policy.gradient_checkpointing"),
    "use_vllm": one_of("vLLM always generates", {True: None}),
    "vllm_mode": one_of(_NO_SERVER, {"colocate": None}),
    "vllm_enable_sleep_mode": renamed("engine.sleep"),
    "vllm_gpu_memory_utilization": renamed("engine.gpu_memory_utilization"),
    "vllm_max_model_length": renamed("engine.max_model_len"),
    "vllm_tensor_parallel_size": renamed("engine.tensor_parallel_size"),
    "vllm_importance_sampling_correction": one_of(
        "loss.correction.mode",
        {True: None, False: "off"},
        "true truncates token ratios at 2 unless vllm_importance_sampling_mode and _clip_max are set",
    ),
    "vllm_importance_sampling_mode": Alias(_sampler_correction, "loss.correction"),
    **each("vllm_importance_sampling_clip_max vllm_importance_sampling_cap", renamed("loss.correction.cap")),
    "vllm_importance_sampling_clip_min": renamed("loss.correction.floor"),
    "save_steps": renamed("checkpoint.every"),
    "save_total_limit": Alias(_kept_checkpoints, "checkpoint.keep_last"),
    "eval_steps": renamed("evaluation.every"),
    **each("logging_steps logging_strategy logging_first_step", not_needed("every step is logged")),
    "report_to": Alias(_report_to, "tracking"),
    **each("per_device_train_batch_size gradient_accumulation_steps steps_per_generation", not_supported(_GEOMETRY)),
    "num_train_epochs": Alias(_epochs, remark="training_steps is given and takes precedence"),
    "cast_lm_head_to_fp32": one_of("logits are cast to fp32 after the matrix product", {False: None}),
    "num_generations_eval": renamed("evaluation.samples_per_prompt"),
    **each("pad_to_multiple_of group_by_length", not_needed("sequences are packed without padding")),
    "generation_kwargs": not_supported("see rollout: temperature, top_p, top_k, min_p, repetition_penalty, stop"),
    "chat_template_kwargs": renamed("model.chat_template_kwargs"),
    "vllm_model_impl": one_of("vLLM's own models", {"vllm": None}),
    "vllm_structured_outputs_regex": not_supported("see structured of environments with type: turns"),
    **each(
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port",
        not_needed(_NO_SERVER),
    ),
    **each(
        "use_transformers_continuous_batching use_transformers_paged",
        one_of("vLLM always generates", {False: None}),
    ),
    "multi_objective_aggregation": one_of("rewards are summed first", {"sum_then_normalize": None}),
    "sync_ref_model": one_of("the reference is the initial model during the whole run", {False: None}),
    "top_entropy_quantile": one_of("every token is trained", {1.0: None}),
    **each("entropy_coef use_adaptive_entropy", one_of("no entropy bonus", {False: None})),
    "off_policy_mask_threshold": not_supported("loss.correction limits off-policy weights"),
    "use_bias_correction_kl": Alias(_bias_correction_of_kl),
    "max_tool_calling_iterations": not_supported("an episode limits its own turns: docs/guides/episodes.md"),
    "log_completions": one_of("tracking.completions_every", {True: 10, False: None}),
    **each("num_completions_to_print log_unique_prompts log_multimodal", not_needed(_ROLLOUTS)),
    "disable_dropout": not_needed("dropout is always off"),
    "router_aux_loss_coef": renamed("policy.load_balancing"),
    **each("cache_implementation transformers_continuous_batching_config", not_supported("vLLM always generates")),
    **each(
        "ref_model_mixup_alpha ref_model_sync_steps",
        not_needed("the reference is the initial model during the whole run"),
    ),
    **each(
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        not_needed("part of use_adaptive_entropy"),
    ),
    **each("sapo_temperature_pos sapo_temperature_neg", not_needed("part of loss_type sapo")),
    **each("vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg", not_needed("part of loss_type vespo")),
    "log_completions_hub_repo": not_supported("upload rollouts.jsonl after the run"),
    # transformers' TrainingArguments
    "warmup_ratio": not_supported("set warmup_steps, in optimizer steps"),
    "torch_compile": renamed("policy.compile"),
    "use_liger_kernel": not_needed("log-probabilities have their own fused kernel"),
    "gradient_checkpointing_kwargs": not_needed("checkpointing is always non-reentrant"),
    "save_strategy": one_of("checkpoint.every", {"steps": None, "no": 0, False: 0}, "also saved at the end"),
    "eval_strategy": one_of("evaluation.every", {"steps": None, "no": 0, False: 0}),
    "eval_on_start": not_needed("start and end are evaluated unless evaluation.every is 0"),
    "per_device_eval_batch_size": not_needed("the engine batches held-out prompts itself"),
    "dataloader_num_workers": not_needed("prompts are tokenized while the engine decodes"),
    "dataloader_pin_memory": not_needed("batches are small"),
    "remove_unused_columns": one_of("rewards get every column", {False: None}),
    "load_best_model_at_end": one_of("set evaluation.keep_best, which exports best_model/", {False: None}),
    "push_to_hub": one_of("set hub.repo, to which the model is pushed", {False: None}),
    "hub_model_id": renamed("hub.repo"),
    "deepspeed": not_supported("weights are sharded by FSDP2; policy.cpu_offload keeps them in host memory"),
    "resume_from_checkpoint": not_supported("start with --resume RUN"),
    "tf32": not_needed("policy.compute_dtype sets the type of the forward pass"),
    "log_on_each_node": not_needed("rank 0 logs for all ranks"),
    "disable_tqdm": not_needed("tracking.console sets what the console shows"),
    "overwrite_output_dir": not_needed("each run has its own folder; --resume continues one"),
    "save_safetensors": one_of("exports are safetensors", {True: None}),
    **each("do_train do_eval", not_needed("a run always trains; see evaluation.every")),
    "full_determinism": renamed("deterministic"),
    "data_seed": not_supported("seed determines all random numbers"),
    "use_cpu": one_of("start with --gpus 0", {False: None}),
    "log_level": one_of("start with --log-level", {"passive": None}),
    "project": one_of("set tracking.wandb_project", {"huggingface": None}),
    "logging_dir": not_needed("tracking.tensorboard writes into the run folder"),
    "save_only_model": one_of("checkpoints include optimizer state; final_model/ is the model alone", {False: None}),
    "ignore_data_skip": one_of("a resumed run continues at its position in the data", {False: None}),
    "auto_find_batch_size": not_needed("micro-batches are as large as the measured memory allows"),
    "average_tokens_across_devices": one_of("the loss counts the tokens of all ranks", {True: None}),
    "lr_scheduler_kwargs": not_supported("policy.min_lr sets the final learning rate"),
    "optim_args": not_supported("see policy.optimizer"),
    "optim_target_modules": not_supported("see policy.lora.target_modules and policy.train_layers"),
    "neftune_noise_alpha": not_supported("noise is not added to embeddings"),
    "label_smoothing_factor": one_of("there are no labels", {0: None}),
    "accelerator_config": not_needed("torchrun starts the ranks"),
    "parallelism_config": not_supported(
        "weights are sharded by FSDP2; see policy.context_parallel and engine.tensor_parallel_size"
    ),
    "eval_delay": one_of("the start is evaluated too", {0: None}),
    "save_on_each_node": one_of("all nodes write into one folder", {False: None}),
    "restore_callback_states_from_checkpoint": one_of("callbacks keep no state in checkpoints", {False: None}),
    "dataset_streaming": one_of("rows are read by index", {False: None}),
    **each(
        "metric_for_best_model greater_is_better",
        not_needed("part of load_best_model_at_end; see evaluation.keep_best"),
    ),
    **each(
        "hub_token hub_private_repo hub_strategy hub_always_push hub_revision",
        not_needed("see hub: docs/guides/sharing.md"),
    ),
    **each(
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
        not_needed("report_to supports wandb and tensorboard"),
    ),
    **each(
        "dataloader_drop_last dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order",
        not_needed("no worker processes; only whole batches are trained"),
    ),
    **each(
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout ddp_find_unused_parameters "
        "ds3_gather_for_generation",
        not_needed("weights are sharded by FSDP2"),
    ),
    **each(
        "bf16_full_eval fp16_full_eval batch_eval_metrics debug do_predict enable_jit_checkpoint "
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object ignore_bias_buffers include_for_metrics "
        "include_num_input_tokens_seen label_names length_column_name liger_kernel_config local_rank log_level_replica "
        "logging_nan_inf_filter prediction_loss_only skip_memory_metrics torch_compile_backend torch_compile_mode "
        "torch_empty_cache_steps train_sampling_strategy use_cache",
        not_needed("part of transformers' own training loop"),
    ),
    # TRL's ScriptArguments and ModelConfig
    "dataset_name": Alias(_dataset_name, "environments.0.name"),
    "datasets": not_supported("write each as {type: dataset, name: ..., rewards: [...]} in environments"),
    "dataset_config": renamed("environments.0.subset"),
    "dataset_train_split": renamed("environments.0.split"),
    "dataset_test_split": renamed("environments.0.eval_split"),
    "reward_funcs": Alias(_reward_funcs, "environments.0.rewards"),
    "reward_weights": Alias(_reward_weights, "environments.0.rewards.0.weight"),
    "reward_model_name_or_path": not_supported("a reward is a function: docs/guides/from_trl.md"),
    "model_revision": renamed("model.revision"),
    "model_init_kwargs": not_supported("see model.revision, model.trust_remote_code and policy.compute_dtype"),
    **each(
        "dtype torch_dtype", one_of(_DTYPE, {"bfloat16": None}, "of the forward pass on CUDA; master weights are fp32")
    ),
    "attn_implementation": not_needed("packed sequences have their own attention"),
}
