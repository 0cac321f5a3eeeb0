"""Every trainer command line in the guides of Atropos' example trainer, verbatim, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SERVER = ["http://localhost:9001"]
QWEN3B, QWEN14B, QWEN72B = (f"Qwen/Qwen2.5-{size}-Instruct" for size in ("3B", "14B", "72B"))
HERMES = "NousResearch/Hermes-3-Llama-3.1-8B"


@dataclass(frozen=True)
class Example:
    """One command line: the arguments after `grpo.py`, `run.py` or `atropos-grpo`."""

    id: str
    text: str
    settings: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.id


def _step(batch: int, accumulation: int, size: int = 8) -> dict[str, int]:
    return {"rollout.prompts_per_step": batch * accumulation // size, "rollout.group_size": size}


def _lora(rank: int = 16, alpha: float = 32) -> dict[str, Any]:
    return {"policy.lora.rank": rank, "policy.lora.alpha": alpha, "policy.lora.target_modules": ["q_proj", "v_proj"]}


BROADCAST = {"engine.bridge": "broadcast", "engine.urls": SERVER, "sync_frequency": 1, "policy.lora": None}
SHARED = {"engine.bridge": "shared", "engine.urls": SERVER, "sync_frequency": 1, "policy.lora": None}
S0 = {
    "VLLM_ENABLE_SHARED_WEIGHTS": "1",
    "NUM_INFERENCE_NODES": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
S1 = {"LOGDIR": "/tmp/atropos_bridge", "NUM_INFERENCE_NODES": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "26756"}

EXAMPLES = (
    Example(
        "first guide, step 9",
        r"""
    --model-name Qwen/Qwen2.5-14B-Instruct \
    --weight-bridge-mode shared_vllm \
    --vllm-port 9001 \
    --lr 1e-6 \
    --batch-size 4 \
    --training-steps 100 \
    --use-shared-memory \
        """,
        {**BROADCAST, "model.name": QWEN14B, "policy.lr": 1e-6, **_step(4, 32), "training_steps": 100},
        S0,
    ),
    Example(
        "first guide, all in one",
        "--model-name Qwen/Qwen2.5-14B-Instruct --weight-bridge-mode shared_vllm --vllm-port 9001 --lr 1e-6 "
        "--batch-size 4 --training-steps 100 --use-shared-memory",
        {**BROADCAST, "model.name": QWEN14B, "policy.lr": 1e-6, **_step(4, 32), "training_steps": 100},
        S0,
    ),
    Example(
        "first guide, single copy",
        r"""
    --model-name Qwen/Qwen2.5-14B-Instruct \
    --weight-bridge-mode shared_vllm \
    --single-copy \
    --training-steps 100 \
        """,
        {**SHARED, "model.name": QWEN14B, "policy.lr": 1e-5, **_step(2, 32), "training_steps": 100},
        S0,
    ),
    Example(
        "first guide, legacy",
        r"""
    --model-name Qwen/Qwen2.5-3B-Instruct \
    --weight-bridge-mode none \
    --training-steps 100 \
    --vllm-restart-interval 10 \
    --batch-size 2 \
    --lr 1e-5
        """,
        {"engine.bridge": "restart", "engine.urls": [], "sync_frequency": 10, "policy.lora": None, **_step(2, 32)},
        S0,
    ),
    Example(
        "first guide, adapters",
        r"""
    --model-name Qwen/Qwen2.5-3B-Instruct \
    --weight-bridge-mode lora_only \
    --lora-r 16 \
    --lora-alpha 32 \
    --training-steps 100 \
    --batch-size 2 \
    --lr 1e-4
        """,
        {"engine.bridge": "adapter", "engine.urls": SERVER, **_lora(), "policy.lr": 1e-4, "sync_frequency": 3},
        S0,
    ),
    Example(
        "first guide, a smaller model",
        r"""
    --model-name Qwen/Qwen2.5-3B-Instruct \
    --weight-bridge-mode shared_vllm \
    --use-shared-memory \
    --training-steps 10 \
        """,
        {**BROADCAST, "model.name": QWEN3B, "training_steps": 10, **_step(2, 32)},
        S0,
    ),
    Example(
        "first guide, quick test",
        r"""
    --model-name Qwen/Qwen2.5-3B-Instruct \
    --weight-bridge-mode lora_only \
    --training-steps 5 \
    --batch-size 1
        """,
        {"engine.bridge": "adapter", "engine.urls": SERVER, **_lora(), **_step(1, 32), "training_steps": 5},
        S0,
    ),
    Example(
        "first guide, production",
        r"""
    --model-name Qwen/Qwen2.5-14B-Instruct \
    --weight-bridge-mode shared_vllm \
    --use-shared-memory \
    --training-steps 1000 \
    --batch-size 4 \
    --lr 1e-6
        """,
        {**BROADCAST, "training_steps": 1000, **_step(4, 32), "policy.lr": 1e-6},
        S0,
    ),
    Example(
        "first guide, two trainer GPUs",
        r"""
    --model-name Qwen/Qwen2.5-72B-Instruct \
    --weight-bridge-mode shared_vllm \
    --use-shared-memory \
    --training-steps 100 \
        """,
        {**BROADCAST, "model.name": QWEN72B, "training_steps": 100, **_step(2, 32)},
        {**S0, "CUDA_VISIBLE_DEVICES": "4,5"},
    ),
    Example(
        "second guide, legacy",
        r"""
  --model-name Qwen/Qwen2.5-3B-Instruct \
  --weight-bridge-mode none \
  --training-steps 100 \
  --vllm-restart-interval 10 \
  --batch-size 2 \
  --gradient-accumulation-steps 16 \
  --lr 1e-5 \
  --use-wandb \
  --wandb-project gsm8k-grpo
        """,
        {
            "engine.bridge": "restart",
            "engine.urls": [],
            "sync_frequency": 10,
            **_step(2, 16),
            "tracking.wandb": "online",
            "tracking.wandb_project": "gsm8k-grpo",
        },
    ),
    Example(
        "second guide, shared",
        r"""
  --model-name Qwen/Qwen2.5-3B-Instruct \
  --weight-bridge-mode shared_vllm \
  --trainer-rank 0 \
  --world-size 1 \
  --num-inference-nodes 0 \
  --training-steps 100 \
  --batch-size 2 \
  --gradient-accumulation-steps 16 \
  --lr 1e-5 \
  --use-wandb \
  --wandb-project gsm8k-grpo-shared
        """,
        {**SHARED, **_step(2, 16), "training_steps": 100, "tracking.wandb_project": "gsm8k-grpo-shared"},
        S1,
    ),
    Example(
        "second guide, adapters",
        r"""
  --model-name Qwen/Qwen2.5-3B-Instruct \
  --weight-bridge-mode lora_only \
  --lora-r 16 \
  --lora-alpha 32 \
  --lora-dropout 0.05 \
  --lora-target-modules q_proj v_proj \
  --training-steps 100 \
  --vllm-restart-interval 20 \
  --batch-size 2 \
  --gradient-accumulation-steps 16 \
  --lr 1e-4 \
  --use-wandb \
  --wandb-project gsm8k-grpo-lora
        """,
        {"engine.bridge": "adapter", **_lora(), "policy.lora.dropout": 0, "sync_frequency": 20, **_step(2, 16)},
    ),
    Example(
        "second guide, quick test",
        r"""
  --model-name Qwen/Qwen2.5-0.5B-Instruct \
  --training-steps 5 \
  --batch-size 1 \
  --gradient-accumulation-steps 4
        """,
        {"engine.bridge": "restart", "engine.urls": [], "sync_frequency": 3, **_step(1, 4, 4), "training_steps": 5},
    ),
    Example(
        "second guide, full adapter training",
        r"""
  --model-name Qwen/Qwen2.5-3B-Instruct \
  --weight-bridge-mode lora_only \
  --lora-r 32 \
  --lora-alpha 64 \
  --training-steps 500 \
  --batch-size 2 \
  --gradient-accumulation-steps 32 \
  --lr 5e-5 \
  --use-wandb \
  --wandb-project gsm8k-lora
        """,
        {"engine.bridge": "adapter", **_lora(32, 64), "policy.lr": 5e-5, **_step(2, 32), "tracking.wandb": "online"},
    ),
    Example(
        "second guide, production",
        r"""
  --model-name Qwen/Qwen2.5-3B-Instruct \
  --weight-bridge-mode shared_vllm \
  --training-steps 1000 \
  --batch-size 4 \
  --gradient-accumulation-steps 16 \
  --lr 1e-5 \
  --use-wandb \
  --wandb-project gsm8k-shared
        """,
        {**SHARED, **_step(4, 16), "training_steps": 1000},
        S1,
    ),
    Example(
        "third guide, minimal",
        r"""
  --model-name Qwen/Qwen3-1.7B-Base \
  --weight-bridge-mode shared_vllm \
  --vllm-port 9001 \
  --vllm-config-path /tmp/grpo_training/vllm_bridge_config.json \
  --atropos-url "http://localhost:8002" \
  --batch-size 1 \
  --gradient-accumulation-steps 64 \
  --warmup-steps 5 \
  --training-steps 30 \
  --kl-coef 0.0 \
  --clip-eps 0.2
        """,
        {
            **SHARED,
            "model.name": "Qwen/Qwen3-1.7B-Base",
            "engine.bridge_config": "/tmp/grpo_training/vllm_bridge_config.json",
            "environments.0.url": "http://localhost:8002",
            **_step(1, 64),
            "policy.warmup_steps": 5,
            "loss.kl.coef": 0,
            "loss.clip_low": 0.2,
            "loss.clip_high": 0.2,
        },
    ),
    Example(
        "fourth guide, adapters",
        r"""
    --model-name NousResearch/Hermes-3-Llama-3.1-8B \
    --weight-bridge-mode lora_only \
    --vllm-port 9001 \
    --atropos-url "http://localhost:8002" \
    --batch-size 4 \
    --gradient-accumulation-steps 4 \
    --warmup-steps 20 \
    --lr 1e-5 \
    --training-steps 30 \
    --clip-eps 0.2 \
    --vllm-restart-interval 5 \
    --save-path ./lora_checkpoints \
    --wandb-project "grpo-training"
        """,
        {
            "engine.bridge": "adapter",
            "engine.urls": SERVER,
            **_lora(),
            "sync_frequency": 5,
            **_step(4, 4),
            "policy.warmup_steps": 20,
            "policy.lr": 1e-5,
            "output_dir": ".",
            "run_name": "lora_checkpoints",
            "tracking.wandb": "off",
            "tracking.wandb_project": "grpo-training",
        },
    ),
    Example(
        "fourth guide, shared",
        r"""
    --model-name NousResearch/Hermes-3-Llama-3.1-8B \
    --weight-bridge-mode shared_vllm \
    --vllm-port 9001 \
    --vllm-config-path /tmp/grpo_training/vllm_bridge_config.json \
    --atropos-url "http://localhost:8002" \
    --warmup-steps 20 \
    --clip-eps 0.2
        """,
        # 20 steps of warmup in a run of 10: the learning rate reaches half of 1e-5.
        {**SHARED, "model.name": HERMES, "training_steps": 10, "policy.warmup_steps": 10, "policy.lr": 5e-6},
    ),
    Example(
        "fourth guide, unified launcher",
        r"""
    --model-name NousResearch/Hermes-3-Llama-3.1-8B \
    --atropos-url "http://localhost:8002" \
    --training-steps 30
        """,
        {
            **SHARED,
            "engine.urls": [],
            "environments.0.server.port": 9001,
            "environments.0.url": "http://localhost:8002",
        },
        {"VLLM_ENABLE_SHARED_WEIGHTS": "1"},
    ),
)
