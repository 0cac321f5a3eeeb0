"""Search for TRL's fastest configuration that fits into device memory.

Preferred in this order: no gradient checkpointing, then the largest micro-batch. Every try is a fresh process, because
torch and vLLM do not return all memory to the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from transformers import PretrainedConfig

from benchmarks.peer import PeerOutOfMemory, PeerRun, PeerSpec, run_peer
from benchmarks.throughput import ModelSize
from benchmarks.workload import LONGEST_PROMPT, MAX_PROMPT_TOKENS
from colocated_grpo.errors import RunError
from colocated_grpo.settings.training import ALL_LINEAR

GIB = 1 << 30
ENGINE_WORKING_BYTES = {"cuda": 4 * GIB, "cpu": 1 * GIB}
"""vLLM's memory besides weights and KV cache: activations of 4,096 batched tokens, logits of 512 sequences, CUDA
graphs. On CPU, which has a fixed cache size, all of it."""
MOMENT_BYTES = 8
"""Adam's two moments of a trained parameter, in fp32."""
MARGIN = 0.05
"""Fraction of device memory that neither trainer nor engine may use."""


class Candidate(NamedTuple):
    """A configuration to try."""

    micro_batch: int
    checkpointing: bool

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch}, checkpointing {'on' if self.checkpointing else 'off'}"


@dataclass(frozen=True)
class Try:
    """A candidate and how it ended."""

    micro_batch: int
    checkpointing: bool
    outcome: str


class TunedRun(NamedTuple):
    """A run of TRL, and the configurations that were tried for it."""

    run: PeerRun
    tries: list[Try]


def candidates(completions: int, micro_batch: int | None, checkpointing: bool | None) -> list[Candidate]:
    """Return the configurations to try, the preferred one first. Given values are fixed; None is searched.

    completions: of one step on one rank.
    """
    sizes = micro_batch_sizes(completions) if micro_batch is None else [micro_batch]
    modes = (False, True) if checkpointing is None else (checkpointing,)
    return [Candidate(size, mode) for mode in modes for size in sizes]


def micro_batch_sizes(completions: int) -> list[int]:
    """Return divisors of `completions`, largest first, each at most half of the one before."""
    sizes = [completions]
    while sizes[-1] > 1:
        sizes.append(next(size for size in range(sizes[-1] // 2, 0, -1) if completions % size == 0))
    return sizes


def trainer_weight_bytes(size: ModelSize, *, adapters: bool) -> int:
    """Return the bytes of TRL's weights over all ranks: fp32; with adapters, frozen ones in the engine's type."""
    return (size.weight_bytes if adapters else 0) + 4 * size.trained_parameters


def engine_fraction(
    size: ModelSize, completions: int, max_completion: int, gpus: int, device_bytes: int, *, adapters: bool
) -> float:
    """Return the fraction of device memory with which vLLM decodes all sequences of a rank together at full length.

    It is smaller if the trainer's state, which stays on the device while vLLM generates, leaves less.
    completions: of one step on one rank.
    """
    tokens = completions * (MAX_PROMPT_TOKENS + max_completion)
    working = ENGINE_WORKING_BYTES["cuda" if gpus else "cpu"]
    needed = size.weight_bytes + tokens * size.kv_bytes_per_token + working
    weights = trainer_weight_bytes(size, adapters=adapters)
    # While the engine starts, each rank holds all weights; they are sharded afterwards.
    trainer = max(weights, (weights + MOMENT_BYTES * size.trained_parameters) / max(1, gpus))
    available = (1 - MARGIN) * device_bytes - trainer
    return max(0.01, round(min(needed, available) / device_bytes, 2))


def least_training_bytes(hf_config: PretrainedConfig, size: ModelSize, spec: PeerSpec, candidate: Candidate) -> float:
    """Return a lower bound of the device memory of the probe step, to skip candidates that cannot fit.

    Counts the trainer's state and, in bf16, the tensors that every implementation keeps for the backward pass: in each
    layer the inputs of all matrix products, attention's inputs and output, and both halves of the gated MLP; with
    checkpointing only each layer's input. Adapters on all linear layers need the same inputs. Adapters on some
    layers keep less, so no tensors are counted for them.
    """
    state = trainer_weight_bytes(size, adapters=spec.lora is not None) + MOMENT_BYTES * size.trained_parameters
    if spec.lora is not None and (spec.lora["target_modules"] != ALL_LINEAR or spec.lora["exclude_modules"]):
        return state / spec.ranks
    text = hf_config.get_text_config()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    layer = 4 * text.hidden_size + 2 * (heads + kv_heads) * head_size + 3 * getattr(text, "intermediate_size", 0)
    kept = text.hidden_size if candidate.checkpointing else layer
    tokens = candidate.micro_batch * (LONGEST_PROMPT + spec.max_completion)  # of the probe step
    return 2 * tokens * text.num_hidden_layers * kept + state / spec.ranks


def total_device_bytes(gpus: int) -> int:
    """Return the memory of one GPU, or of the host for 0 GPUs."""
    return torch.cuda.get_device_properties(0).total_memory if gpus else psutil.virtual_memory().total


def run_tuned(
    spec: PeerSpec,
    tried: Sequence[Candidate],
    least_bytes: Callable[[Candidate], float],
    device_bytes: int,
    scratch: Path,
) -> TunedRun:
    """Run TRL with the first candidate that fits, and print every try.

    A try begins with a probe step and goes on to the measured steps in the same process. It fails when any step runs
    out of memory. A single candidate needs no probe. Raises RunError if none fits, or if the engine itself does not.
    """
    tries: list[Try] = []

    def note(candidate: Candidate, outcome: str) -> None:
        print(f"TRL: {candidate}: {outcome}", flush=True)
        tries.append(Try(*candidate, outcome))

    searching, failed = len(tried) > 1, False
    for candidate in tried:
        least = least_bytes(candidate)
        if searching and least > device_bytes:
            note(candidate, f"skipped, needs at least {least / GIB:.0f} of {device_bytes / GIB:.0f} GiB")
            continue
        if failed and spec.until is not None and time.time() > spec.until:
            raise RunError(f"--peer-until: the time was up before a configuration of TRL fitted; next was {candidate}")
        setup = replace(spec.setup, **candidate._asdict(), probe=searching)
        print(f"TRL: {candidate}: trying", flush=True)
        try:
            run = run_peer(replace(spec, setup=setup), scratch)
        except PeerOutOfMemory as error:
            note(candidate, f"out of memory during {error.phase}")
            if error.phase != "training":
                raise RunError(
                    f"--peer-gpu-memory={setup.engine_fraction}: TRL ran out of memory during {error.phase}, where the "
                    "micro-batch does not matter; set it lower"
                ) from None
            failed = True
            continue
        note(candidate, "fits")
        return TunedRun(run, tries)
    raise RunError("--peer=trl: no configuration of TRL fits into device memory; use more GPUs or shorter completions")
