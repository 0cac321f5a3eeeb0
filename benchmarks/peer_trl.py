"""One run of TRL's GRPOTrainer on the work of `benchmarks.step`, with its co-located vLLM in sleep mode.

Every rank runs `python -m benchmarks.peer_trl SPEC RESULT`. TRL is imported in functions only, so that
the rest of this module can be tested without it.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from accelerate.utils import gather_object
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from benchmarks.peer import WARMUP, OutOfMemoryPhase, PeerSpec, failure_file, grpo_arguments
from benchmarks.peer_layers import name_present_layers
from benchmarks.workload import CHARACTERS, LONGEST_PROMPT, RandomWork
from colocated_grpo.phases import Clock
from colocated_grpo.policy.model_files import stop_token_ids
from colocated_grpo.runtime.verdict import end_process
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from trl import GRPOTrainer

P = ParamSpec("P")
R = TypeVar("R")
LONGEST_RECORDED = 16
"""Longer lists among the arguments are recorded as their length."""


def build_trainer(spec: PeerSpec, output: Path) -> tuple[GRPOTrainer, JsonObject]:
    """Return the trainer and a JSON record of its arguments and of GRPOConfig's."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(spec.model, padding_side="left", truncation_side="left")
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    # vLLM also reads the stop tokens from the model folder; passing them makes both trainers use the same list.
    stops = list(stop_token_ids(tokenizer, Path(spec.model)))
    config: JsonObject = {
        "output_dir": str(output),
        "generation_kwargs": {"stop_token_ids": stops},
        **grpo_arguments(spec),
    }
    rows = chats(spec)
    trainer = GRPOTrainer(
        spec.model,
        reward_funcs=reward,
        args=GRPOConfig(**config),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=None if spec.lora is None else LoraConfig(**spec.lora),
    )
    assert trainer.model is not None
    name_present_layers(trainer.model)
    record = {
        "model": spec.model,
        "reward_funcs": "a hash of the completion (RandomWork.score)",
        "args": "GRPOConfig",
        "train_dataset": f"{len(rows)} prompts of {RandomWork.__name__}",
        "processing_class": f"{type(tokenizer).__name__}(padding_side='left', truncation_side='left')",
        "peft_config": None if spec.lora is None else {"LoraConfig": spec.lora},
    }
    return trainer, {"GRPOConfig": shortened(config), "GRPOTrainer": record}


def shortened(value: Any) -> Any:
    """Return JSON data with every long list replaced by a description."""
    if isinstance(value, dict):
        return {name: shortened(part) for name, part in value.items()}
    return f"{len(value)} values" if isinstance(value, list) and len(value) > LONGEST_RECORDED else value


def chats(spec: PeerSpec) -> list[JsonObject]:
    """Return our prompts in our order, as the chat messages that our trainer builds from them.

    If there is a probe step, its prompts, of maximum length, come first.
    """
    longest = repeat({"prompt": CHARACTERS[0] * LONGEST_PROMPT}, spec.prompts if spec.setup.probe else 0)
    items = islice(RandomWork().prompts(spec.seed, "train"), spec.prompts * spec.steps)
    return [{"prompt": [{"role": "user", "content": item["prompt"]}]} for item in (*longest, *items)]


def reward(completions: Sequence[Sequence[Mapping[str, str]]], **_columns: Any) -> list[float | None]:
    return [RandomWork().score({}, turns[0]["content"]) for turns in completions]


class Recorder(TrainerCallback):
    """Callback that records one row per optimizer step of this rank.

    A step is timed from the end of the one before. The probe step is not recorded.
    """

    def __init__(self, trainer: GRPOTrainer, spec: PeerSpec) -> None:
        self._until = math.inf if spec.until is None else spec.until
        self._probing = spec.setup.probe
        self._lengthens_all = spec.lengthened
        self.rows: list[dict[str, float]] = []
        self.started = 0.0
        """Unix time at which the first recorded step began."""
        self.in_first_generation = False
        self._device = trainer.accelerator.device
        self._clock = Clock(self._device)
        self._counts: dict[str, float] = {}
        self._step_began = 0.0
        self._completed_steps = 0
        self._instrument(trainer)

    def _instrument(self, trainer: GRPOTrainer) -> None:
        """Time TRL's phases, and lengthen completions of the probe step, or of all steps if the spec asks for it."""
        engine = trainer.vllm_generation
        lengthened = self._lengthened(engine, engine.generate)
        replace_method(engine, "sync_weights", self._during_generation(self._timed("sync", engine.sync_weights)))
        replace_method(engine, "generate", self._during_generation(self._timed("generate", lengthened)))
        llm = engine.llm
        wake_up = {part: self._timed(f"wake_{part}", llm.wake_up) for part in ("weights", "kv_cache")}
        replace_method(llm, "sleep", self._timed("sleep", llm.sleep))
        replace_method(llm, "wake_up", lambda tags: wake_up[tags[0]](tags=tags))
        replace_method(llm, "generate", self._noting_memory(llm.generate))
        collect = self._timed("collect", trainer._generate_and_score_completions)
        replace_method(trainer, "_generate_and_score_completions", self._counted(collect))

    def _timed(self, phase: str, method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def timed(*arguments: P.args, **named: P.kwargs) -> R:
            with self._clock.time(phase):
                return method(*arguments, **named)

        return timed

    def _during_generation(self, method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def marked(*arguments: P.args, **named: P.kwargs) -> R:
            self.in_first_generation = self._completed_steps == 0
            result = method(*arguments, **named)
            self.in_first_generation = False  # stays True after an exception, to identify the phase that failed
            return result

        return marked

    def _noting_memory(self, method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def noting(*arguments: P.args, **named: P.kwargs) -> R:
            result = method(*arguments, **named)
            self._clock.note_memory("generate")
            return result

        return noting

    def _lengthened(self, engine: Any, method: Callable[P, Sequence[list[list[Any]]]]) -> Callable[P, Any]:
        """Wrap `method` so that completions have the maximum length, in the probe step or in all steps.

        One token per completion is sampled and repeated, which costs almost no decoding.
        """

        @wraps(method)
        def lengthened(*arguments: P.args, **named: P.kwargs) -> Any:
            if not (self._probing or self._lengthens_all):
                return method(*arguments, **named)
            with temporary(engine, "max_completion_length", 1) as greatest:
                prompts, *aligned = method(*arguments, **named)
            return prompts, *([row + row[-1:] * (greatest - len(row)) for row in rows] for rows in aligned)

        return lengthened

    def _counted(self, method: Callable[..., Mapping[str, torch.Tensor]]) -> Callable[..., Mapping[str, torch.Tensor]]:
        def counted(inputs: Any) -> Mapping[str, torch.Tensor]:
            batch = method(inputs)
            prompts, completions = batch["prompt_mask"], batch["completion_mask"]
            self._counts = {
                "sequences": float(len(prompts)),
                "prompt_tokens": float(prompts.sum()),
                "completion_tokens": float(completions.sum()),
                # Every micro-batch is padded to the width of the whole batch.
                "computed_tokens": float(prompts.numel() + completions.numel()),
            }
            return batch

        return counted

    def on_train_begin(self, *_arguments: Any, **_named: Any) -> None:
        self._begin_step()

    def _begin_step(self) -> None:
        self.started = self.started if self.rows else time.time()
        self._step_began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._completed_steps += 1
        self._clock.note_memory("train")
        measured = self._clock.read()
        if self._probing:
            self._probing = False
            self._begin_step()
            return
        seconds = {name.removeprefix("seconds/"): value for name, value in measured.items()}
        memory = {name: value for name, value in measured.items() if name.startswith("memory/")}
        self.rows.append({**own_seconds(seconds, now - self._step_began), **memory, **self._counts})
        late = time.time() > self._until and len(self.rows) > WARMUP
        # Gathered, so that all ranks stop after the same step.
        control.should_training_stop |= any(gather_object([late]))
        self._begin_step()


def replace_method(owner: object, name: str, method: Callable[..., Any]) -> None:
    """Replace a method on one object, to instrument a library's class."""
    setattr(owner, name, method)


@contextmanager
def temporary(owner: Any, name: str, value: int) -> Generator[int]:
    """Set an attribute within the context, and yield its former value."""
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield former
    finally:
        setattr(owner, name, former)


def own_seconds(nested: Mapping[str, float], step: float) -> dict[str, float]:
    """Return the seconds of each phase without nested phases: TRL wakes inside its sync, sleeps inside generation."""

    def of(phase: str) -> float:
        return nested.get(phase, 0.0)  # CPU runs have neither sleep nor wake

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
    """Return one row for a step of all ranks: seconds and memory of rank 0, as in our own rows, and tokens of all."""
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


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for torch's OutOfMemoryError, and for such RuntimeErrors of vLLM's allocator, NCCL and cuBLAS."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in text.lower()
        or "CUBLAS_STATUS_ALLOC_FAILED" in text
    )


def prepare_cpu() -> None:
    """Patch vLLM's CPU build for TRL: weights stay writable after loading, and compilation is off.

    On GPUs vLLM is not patched.
    """
    import trl.generation.vllm_generation as generation

    from colocated_grpo.rollout.vllm import patches

    patches.apply("cpu", [row for row in patches.PATCHES if row.target.endswith(":dispatch_cpu_unquantized_gemm")])
    replace_method(generation, "LLM", partial(generation.LLM, enforce_eager=True))


def main(spec_file: Path, result: Path) -> None:
    spec = PeerSpec.read(spec_file)
    if not spec.gpus:
        prepare_cpu()
    recorder = None
    try:
        trainer, arguments = build_trainer(spec, result.with_suffix(""))
        model = trainer.model
        assert model is not None
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        recorder = Recorder(trainer, spec)
        trainer.add_callback(recorder)
        trainer.train()
    except Exception as error:
        if is_out_of_memory(error):
            phase: OutOfMemoryPhase = "start"
            if recorder is not None:
                phase = "first generation" if recorder.in_first_generation else "training"
            failure_file(result).write_text(json.dumps({"out_of_memory": phase}))
        raise
    by_rank = gather_object([recorder.rows])
    if trainer.accelerator.is_main_process:
        rows = [merge(ranks) for ranks in zip(*by_rank, strict=True)]
        content = {
            "started": recorder.started,
            "steps": rows,
            "arguments": arguments,
            "trained_parameters": trained,
        }
        result.write_text(json.dumps(content, default=str))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    exit_code = 0
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        exit_code = 1
    # Skip interpreter shutdown: after a failure other ranks may be stuck in a collective, and vLLM engines that slept
    # are known to crash during teardown.
    end_process(exit_code)
