"""Names of Atropos' example trainer; its flags (`--clip-eps`) are these with hyphens. See docs/guides/atropos.md."""

from __future__ import annotations

from typing import Any

from colocated_grpo.config.alias_kinds import Alias, Lookup, no_equivalent, not_needed, one_of, renamed


def _clip(_key: str, value: Any, _look: Lookup) -> dict[str, Any]:
    return {"loss.clip_low": value, "loss.clip_high": value}


def _atropos_url(_key: str, value: Any, _look: Lookup) -> dict[str, Any]:
    return {"environments.0.type": "atropos", "environments.0.url": value}


_ONE_PROCESS = "trainer and engine are one process"

ATROPOS: dict[str, Alias] = {
    "lr": renamed("policy.lr"),
    "optimizer": one_of(
        "policy.optimizer.type", {"adamw": "adamw", "adamw_8bit": "adamw_8bit", "adafactor": "adafactor"}
    ),
    "clip_eps": Alias(_clip, "loss.clip_low"),
    "kl_coef": one_of("loss.kl.coef with loss.kl.target: rollout is nearest", {0.0: None}),
    "seq_len": no_equivalent("set rollout.max_prompt_tokens and rollout.max_completion_tokens"),
    "save_path": renamed("output_dir"),
    "checkpoint_interval": renamed("checkpoint.every"),
    "use_wandb": one_of("tracking.wandb", {True: "online", False: "off"}),
    "wandb_project": renamed("tracking.wandb_project"),
    "wandb_group": renamed("tracking.wandb_group"),
    "atropos_url": Alias(_atropos_url, "environments.0.url"),
    "vllm_port": renamed("environments.0.server.port"),
    "max_model_len": renamed("engine.max_model_len"),
    "gpu_memory_utilization": renamed("engine.gpu_memory_utilization"),
    "weight_bridge_mode": one_of(_ONE_PROCESS, {"none": None, "shared_vllm": None}, _ONE_PROCESS),
    "vllm_restart_interval": not_needed("the engine gets the weights of every step; see sync_frequency"),
    "vllm_config_path": not_needed(_ONE_PROCESS),
    "num_inference_nodes": not_needed(_ONE_PROCESS),
    "device": no_equivalent("start with --gpus N, 0 for the CPU"),
}
