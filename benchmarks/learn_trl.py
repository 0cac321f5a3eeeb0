"""One run of `benchmarks.learn` through TRL's GRPOTrainer. TRL is imported in functions only."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.learn_run import (
    BETAS,
    CACHE_BYTES,
    CLIP,
    CORRECTION_CAP,
    EPS,
    LORA_ALPHA,
    LORA_RANK,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    StepRecorder,
    Work,
    record,
)
from benchmarks.learn_tasks import SHOP_PARSER, chats, price, score_chat, task_of
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from trl import GRPOTrainer


@dataclass(frozen=True, kw_only=True)
class TRLSetup:
    """Arguments that affect TRL's speed but not its result, `dtype` excepted."""

    sleep: bool = False
    liger: bool = False
    attention: str = "sdpa"
    """attn_implementation of transformers."""
    micro_batch: int = 256
    engine_fraction: float = 0.3
    checkpointing: bool = False
    compile: bool = False
    dtype: str = "float32"
    """Type of the loaded weights. TRL's default, float32, trains masters in float32 with bfloat16 autocast."""


def run_trl(work: Work, setup: TRLSetup, changes: JsonObject, save: Path | None) -> JsonObject:
    """Train with TRL, save the final model, and return the record of the run. changes: arguments of GRPOConfig."""
    import torch
    from transformers import TrainerCallback

    from benchmarks.peer_trl import prepare_cpu

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        prepare_cpu()
    elif work.parallel > 1:
        _fix_cache_size()
    recorder, rewards = StepRecorder(), list[float]()

    class StepTimes(TrainerCallback):
        def on_train_begin(self, *_arguments: Any, **_named: Any) -> None:
            recorder.begin(time.perf_counter())

        def on_step_end(self, *_arguments: Any, **_named: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            recorder.end_step(sum(rewards) / len(rewards), completion_tokens=lengths.pop())
            rewards.clear()

    lengths: list[float] = []
    with tempfile.TemporaryDirectory(prefix="learn-trl-") as scratch:
        trainer, arguments = build_trl(work, setup, changes, Path(scratch), rewards, on_gpu=on_gpu)
        _note_lengths(trainer, lengths)
        trainer.add_callback(StepTimes())
        trainer.train()
        if save is not None:
            _save(trainer, work, save)
    return record(recorder, {"setup": asdict(setup), **arguments})


def trl_arguments(work: Work, setup: TRLSetup, changes: JsonObject, output: Path, *, on_gpu: bool) -> JsonObject:
    """Return the arguments of GRPOConfig; all others keep their defaults."""
    task = task_of(work.task)
    completions = work.prompts * work.group_size
    # Runs that share the device share its memory; the gradient does not depend on the micro-batch.
    largest = max(1, setup.micro_batch // work.parallel)
    micro_batch = next(size for size in range(min(largest, completions), 0, -1) if completions % size == 0)
    # Plus the messages of a tool: TRL cuts the second message only after sampling it.
    longest = task.max_prompt + task.max_completion * (2 if task.is_episode else 1)
    return {
        "output_dir": str(output),
        "max_steps": work.steps,
        "seed": work.seed,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": completions // micro_batch,
        "num_generations": work.group_size,
        "shuffle_dataset": False,
        "max_completion_length": task.max_completion,
        "temperature": 1.0,
        "learning_rate": work.lr,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_grad_norm": MAX_GRAD_NORM,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "weight_decay": WEIGHT_DECAY,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "epsilon": CLIP,
        "epsilon_high": CLIP,
        "beta": 0.0,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": CORRECTION_CAP,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": setup.sleep and on_gpu,
        "vllm_gpu_memory_utilization": round(setup.engine_fraction / work.parallel, 3),
        "vllm_max_model_length": longest,
        "gradient_checkpointing": setup.checkpointing,
        "use_liger_kernel": setup.liger,
        "torch_compile": setup.compile,
        "model_init_kwargs": {"dtype": setup.dtype, "attn_implementation": setup.attention},
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **({"max_tool_calling_iterations": 1} if task.is_episode else {}),
        **changes,
    }


def build_trl(
    work: Work, setup: TRLSetup, changes: JsonObject, output: Path, rewards: list[float], *, on_gpu: bool
) -> tuple[GRPOTrainer, JsonObject]:
    """Return TRL's trainer, whose rewards are appended to `rewards`, and a record of its arguments."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, PreTrainedTokenizerBase
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.adapters import peft_arguments
    from benchmarks.peer_layers import name_present_layers
    from benchmarks.peer_trl import shortened
    from colocated_grpo.policy.model_files import stop_token_ids
    from colocated_grpo.settings.training import LoRAConfig

    task = task_of(work.task)
    environment = task.build()
    tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left", truncation_side="left")
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    if task.is_episode:
        add_tools(tokenizer)

    def reward(completions: list[list[JsonObject]], item: list[str], **_columns: Any) -> list[float | None]:
        given = [
            score_chat(task, environment, json.loads(row), messages)
            for row, messages in zip(item, completions, strict=True)
        ]
        rewards.extend(given)
        return [*given]

    config = trl_arguments(work, setup, changes, output, on_gpu=on_gpu)
    config["generation_kwargs"] = {"stop_token_ids": list(stop_token_ids(tokenizer, Path(work.model)))}
    lora = peft_arguments(LoRAConfig(rank=LORA_RANK, alpha=LORA_ALPHA)) if work.mode == "lora" else None
    trainer = GRPOTrainer(
        work.model,
        reward_funcs=reward,
        args=GRPOConfig(**config),
        train_dataset=Dataset.from_list(chats(task, work.seed, work.steps * work.prompts)),
        processing_class=tokenizer,
        peft_config=None if lora is None else LoraConfig(**lora),
        tools=[price] if task.is_episode else None,
    )
    assert trainer.model is not None
    name_present_layers(trainer.model)
    return trainer, {"GRPOConfig": shortened({**config, "output_dir": None}), "LoraConfig": lora}


def add_tools(tokenizer: Any) -> None:
    """Prepare a tokenizer for TRL's tools: add a parser of the shop's calls, and a template that can render calls.

    TRL rejects a template that drops calls, although training never renders one: sampled tokens are kept.
    """
    content = "message['content']"
    calls = "(message['tool_calls'] | tojson if message['tool_calls'] is defined else '')"
    assert content in tokenizer.chat_template, "the chat template writes no message['content']"
    tokenizer.chat_template = tokenizer.chat_template.replace(content, f"({content} + {calls})")
    tokenizer.response_template = SHOP_PARSER


def _note_lengths(trainer: GRPOTrainer, lengths: list[float]) -> None:
    """Append the mean number of trained tokens of a completion, once for each batch."""
    from benchmarks.peer_trl import replace_method

    collect = trainer._generate_and_score_completions

    def collected(inputs: Any) -> Any:
        batch = collect(inputs)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        lengths.append(float(mask.sum()) / len(mask))
        return batch

    replace_method(trainer, "_generate_and_score_completions", collected)


def _fix_cache_size() -> None:
    """Give TRL's engine a KV cache of a fixed size, for which TRL has no argument.

    Otherwise vLLM counts the memory of runs that start beside it as its own and finds no room for a cache.
    """
    from functools import partial

    import trl.generation.vllm_generation as generation

    from benchmarks.peer_trl import replace_method

    replace_method(generation, "LLM", partial(generation.LLM, kv_cache_memory_bytes=CACHE_BYTES))


def _save(trainer: GRPOTrainer, work: Work, folder: Path) -> None:
    """Write the final model in bfloat16, an adapter merged in the base's type."""
    import torch

    model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    merged = model.merge_and_unload() if work.mode == "lora" else model
    merged.to(torch.bfloat16).save_pretrained(folder)
