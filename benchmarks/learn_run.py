"""Work of `benchmarks.learn`, equal for both trainers, and one run of it through ours."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.learn_tasks import task_of
from colocated_grpo.types import JsonObject

Mode = Literal["full", "lora"]
LR: Mapping[Mode, float] = {"full": 1e-5, "lora": 1e-4}
LORA_RANK, LORA_ALPHA = 32, 32
CLIP = 0.2
CORRECTION_CAP = 2.0
"""Greatest importance weight of a token, in both trainers."""
MAX_GRAD_NORM = 1.0
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.0
CACHE_BYTES = 2 << 30
"""KV cache of a run beside others: enough for 256 sequences of these models, and independent of what is free."""
MICRO_BATCH_TOKENS = 4096
"""Tokens of a forward pass of such a run; alone, our trainer measures how many fit."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one run, the same for both trainers."""

    task: str
    mode: Mode
    model: str
    seed: int
    steps: int
    prompts: int = 32
    group_size: int = 8
    parallel: int = 1
    """Runs on the device at the same time."""

    @property
    def lr(self) -> float:
        return LR[self.mode]


class StepRecorder:
    """Rows of one run: each step's reward and seconds, and its end in seconds since the first step began.

    A step lasts from the end of the one before, so all work between steps counts.
    """

    def __init__(self) -> None:
        self.rows: list[JsonObject] = []
        self.start_seconds = 0.0
        """From the start of the process to the beginning of the first step."""
        self._began = 0.0

    def begin(self, began: float) -> None:
        """Set the beginning of the first step, in time.perf_counter()'s seconds."""
        self._began = began
        process_age = time.time() - psutil.Process().create_time()
        self.start_seconds = process_age - (time.perf_counter() - began)

    def end_step(self, reward: float, **figures: float) -> None:
        wall = time.perf_counter() - self._began
        former = self.rows[-1]["wall"] if self.rows else 0.0
        self.rows.append({"reward": reward, "seconds": wall - former, "wall": wall, **figures})


def run_ours(work: Work, changes: JsonObject, save: Path | None) -> JsonObject:
    """Train with our trainer, save the final model, and return the record of the run."""
    from colocated_grpo.api.trainer import Trainer

    class Steps:
        recorder = StepRecorder()

        def on_step_end(self, state: Any) -> None:
            if not self.recorder.rows:
                self.recorder.begin(time.perf_counter() - state.metrics["seconds/step"])
            shown = ("completion_tokens", "mismatch/kl", "grad_norm", "entropy")
            phases = [name for name in state.metrics if name.startswith("seconds/") and name != "seconds/step"]
            figures = {name: state.metrics[name] for name in (*shown, *phases) if name in state.metrics}
            self.recorder.end_step(state.metrics["reward"], **figures)

    with tempfile.TemporaryDirectory(prefix="learn-ours-") as scratch:
        settings = our_settings(work, changes, Path(scratch))
        steps = Steps()
        result = Trainer(**settings, callbacks=[steps]).train()
        if save is not None:
            # With an adapter, the merged model: benchmarks.learn score loads whole models.
            shutil.move(Path(result.folder) / "final_model", save)
    return record(steps.recorder, {"settings": {**settings, "output_dir": None}})


def our_settings(work: Work, changes: JsonObject, output: Path) -> JsonObject:
    """Return the settings of our trainer. All that is not named has its default. changes: sections to merge."""
    task = task_of(work.task)
    settings: JsonObject = {
        "model": work.model,
        "environments": [task.source],
        "seed": work.seed,
        "training_steps": work.steps,
        "output_dir": str(output),
        "rollout": {
            "prompts_per_step": work.prompts,
            "group_size": work.group_size,
            "max_prompt_tokens": task.max_prompt,
            "max_completion_tokens": task.max_completion,
            "temperature": 1.0,
        },
        "advantage": {"scale": "group"},
        "loss": {
            "type": "dapo",
            "clip_low": CLIP,
            "clip_high": CLIP,
            "correction": {"level": "token", "mode": "truncate", "cap": CORRECTION_CAP},
            "kl": {"coef": 0.0},
        },
        "policy": {
            "lr": work.lr,
            "schedule": "constant",
            "warmup_steps": 0,
            "grad_clip": MAX_GRAD_NORM,
            "optimizer": {"beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "weight_decay": WEIGHT_DECAY},
            "lora": {"rank": LORA_RANK, "alpha": LORA_ALPHA} if work.mode == "lora" else None,
        },
        "evaluation": {"every": 0},
        "checkpoint": {"every": 0, "export_merged": work.mode == "lora"},
        "tracking": {"console": "plain"},
    }
    if work.parallel > 1:
        settings["engine"] = {"kv_cache_memory_bytes": CACHE_BYTES}
        settings["batch"] = {"max_tokens_per_micro_batch": MICRO_BATCH_TOKENS}
    for name, value in changes.items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    return settings


def record(recorder: StepRecorder, configuration: JsonObject) -> JsonObject:
    """Return the part of a run's result that the trainer gives."""
    return {"start_seconds": recorder.start_seconds, "steps": recorder.rows, "configuration": configuration}


def library_variables(parallel: int) -> dict[str, str]:
    """Return the environment variables of a run, which libraries read when they are imported."""
    from colocated_grpo.runtime.program import library_environment
    from colocated_grpo.servers.engine_servers import free_ports

    variables = {
        **library_environment("INFO"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # TRL prefers one port, for which two runs on a machine would compete. Our trainer sets its own.
        "MASTER_PORT": str(free_ports(1)[0]),
    }
    if parallel > 1:
        variables["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // parallel))
    return variables
