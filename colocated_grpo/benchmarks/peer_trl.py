"""The same work through TRL's GRPOTrainer, co-located with sleep mode: what `benchmarks.step --peer trl` runs.

Every rank runs `python -m colocated_grpo.benchmarks.peer_trl SPEC RESULT`. TRL is imported in functions only: what
is reckoned here is tested where TRL is not installed.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from transformers import AutoTokenizer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from colocated_grpo.benchmarks.peer import PeerSpec
from colocated_grpo.benchmarks.workload import MAX_PROMPT_TOKENS, RandomWork
from colocated_grpo.build.data import stop_token_ids
from colocated_grpo.phases import Clock

if TYPE_CHECKING:
    from trl import GRPOTrainer


def trainer_arguments(spec: PeerSpec) -> dict[str, Any]:
    """Arguments of GRPOConfig. What is left out keeps TRL's default, gradient checkpointing and DAPO loss included."""
    on_gpu = spec.gpus > 0
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": on_gpu,
        "vllm_gpu_memory_utilization": spec.gpu_memory,
        "vllm_max_model_length": MAX_PROMPT_TOKENS + spec.max_completion,
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "per_device_train_batch_size": spec.batch,
        "gradient_accumulation_steps": spec.completions // (spec.batch * spec.ranks),
        "num_generations": spec.group_size,
        "max_completion_length": spec.max_completion,
        "max_steps": spec.steps,
        "lr_scheduler_type": "constant",
        "seed": spec.seed,
        "shuffle_dataset": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **spec.changes,
    }


def build_trainer(spec: PeerSpec, output: Path) -> GRPOTrainer:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(spec.model, padding_side="left", truncation_side="left")
    # vLLM reads the model's stop tokens by itself; given here they are the trainer's own list beyond doubt.
    stops = list(stop_token_ids(tokenizer, Path(spec.model)))
    arguments = {"generation_kwargs": {"stop_token_ids": stops}, **trainer_arguments(spec)}
    return GRPOTrainer(
        spec.model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(output), **arguments),
        train_dataset=Dataset.from_list(chats(spec)),
        processing_class=tokenizer,
    )


def chats(spec: PeerSpec) -> list[dict[str, Any]]:
    """Our prompts in our order, as the chat message that our trainer makes of a text."""
    items = islice(RandomWork().prompts(spec.seed, "train"), spec.prompts * spec.steps)
    return [{"prompt": [{"role": "user", "content": item["prompt"]}]} for item in items]


def reward(completions: Sequence[Sequence[Mapping[str, str]]], **_columns: Any) -> list[float]:
    return [RandomWork().score({}, turns[0]["content"]) for turns in completions]


class Recorder(TrainerCallback):
    """One row for each optimizer step of this rank, from the end of the step before to its own end."""

    def __init__(self, trainer: GRPOTrainer, until: float | None) -> None:
        self._until = math.inf if until is None else until
        self.rows: list[dict[str, float]] = []
        self.started = 0.0
        """Unix time at which the first step began."""
        self._device = trainer.accelerator.device
        self._clock = Clock(self._device)
        self._counts: dict[str, float] = {}
        self._watch(trainer)

    def _watch(self, trainer: GRPOTrainer) -> None:
        engine = trainer.vllm_generation
        engine.sync_weights = self._timed("sync", engine.sync_weights)
        engine.generate = self._timed("generate", engine.generate)
        engine.llm.sleep = self._timed("sleep", engine.llm.sleep)
        wake = {part: self._timed(f"wake_{part}", engine.llm.wake_up) for part in ("weights", "kv_cache")}
        engine.llm.wake_up = lambda tags: wake[tags[0]](tags=tags)
        engine.llm.generate = self._noting_memory(engine.llm.generate)
        collect = self._timed("collect", trainer._generate_and_score_completions)
        trainer._generate_and_score_completions = self._counted(collect)

    def _timed(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*arguments: Any, **named: Any) -> Any:
            with self._clock.time(phase):
                return method(*arguments, **named)

        return timed

    def _noting_memory(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def noting(*arguments: Any, **named: Any) -> Any:
            result = method(*arguments, **named)
            self._clock.note_memory("generate")
            return result

        return noting

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(inputs: Any) -> Any:
            batch = method(inputs)
            prompts, completions = batch["prompt_mask"], batch["completion_mask"]
            self._counts = {
                "sequences": float(len(prompts)),
                "prompt_tokens": float(prompts.sum()),
                "completion_tokens": float(completions.sum()),
                # Every micro-batch keeps the width of the whole batch.
                "computed_tokens": float(prompts.numel() + completions.numel()),
            }
            return batch

        return counted

    def on_train_begin(self, *_arguments: Any, **_named: Any) -> None:
        self.started = time.time()
        self._step_began = time.perf_counter()

    def on_step_end(
        self, _arguments: TrainingArguments, _state: TrainerState, control: TrainerControl, **_named: Any
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._clock.note_memory("train")
        measured = self._clock.read()
        seconds = {name.removeprefix("seconds/"): value for name, value in measured.items()}
        memory = {name: value for name, value in measured.items() if name.startswith("memory/")}
        self.rows.append({**own_seconds(seconds, now - self._step_began), **memory, **self._counts})
        # Whichever rank is late, all of them end with the same step.
        control.should_training_stop |= any(gather_object([time.time() > self._until]))
        self._step_began = time.perf_counter()


def own_seconds(nested: Mapping[str, float], step: float) -> dict[str, float]:
    """Seconds of each phase without the phases inside it: TRL wakes inside its sync, and sleeps inside generation."""
    of = lambda phase: nested.get(phase, 0.0)  # noqa: E731, CPU runs neither sleep nor wake
    return {
        "seconds/step": step,
        "seconds/generate": of("generate") - of("wake_kv_cache") - of("sleep"),
        "seconds/score": of("collect") - of("sync") - of("generate"),
        "seconds/train": step - of("collect"),
        "seconds/sync": of("sync") - of("wake_weights"),
        "seconds/wake": of("wake_weights") + of("wake_kv_cache"),
        "seconds/sleep": of("sleep"),
    }


def merge(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One step over all ranks: seconds and memory of rank 0, as our own; tokens of all."""
    total = partial(_total, ranks)
    loads = [rank["prompt_tokens"] + rank["completion_tokens"] for rank in ranks]
    tokens = sum(loads)
    return {
        **{name: value for name, value in ranks[0].items() if name.startswith(("seconds/", "memory/"))},
        "tokens": tokens,
        "trained_tokens": tokens,
        "prompt_tokens": total("prompt_tokens") / total("sequences"),
        "completion_tokens": total("completion_tokens") / total("sequences"),
        "padding": 1 - tokens / total("computed_tokens"),
        "imbalance": max(loads) * len(loads) / tokens - 1,
    }


def _total(ranks: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(rank[name] for rank in ranks)


def prepare_cpu() -> None:
    """Let TRL run on vLLM's CPU build: weights that can be written in place, and no minute of compilation."""
    import trl.generation.vllm_generation as generation

    from colocated_grpo.rollout.vllm import process as vllm_process

    vllm_process.linear_layers.dispatch_cpu_unquantized_gemm = vllm_process._plain_cpu_linear
    generation.LLM = partial(generation.LLM, enforce_eager=True)


def main(spec_file: Path, result: Path) -> None:
    spec = PeerSpec(**json.loads(spec_file.read_text()))
    if not spec.gpus:
        prepare_cpu()
    trainer = build_trainer(spec, result.with_suffix(""))
    recorder = Recorder(trainer, spec.until)
    trainer.add_callback(recorder)
    trainer.train()
    by_rank = gather_object([recorder.rows])
    if trainer.accelerator.is_main_process:
        rows = [merge(ranks) for ranks in zip(*by_rank, strict=True)]
        result.write_text(json.dumps({"started": recorder.started, "steps": rows}))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    # Not sys.exit: engines that slept are known to crash while Python tears them down, and everything is written.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
