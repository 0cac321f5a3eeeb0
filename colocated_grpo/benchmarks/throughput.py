"""Throughput, MFU and lower bounds of a step, from its seconds and tokens.

Tokens are the prompt and completion tokens of real rollouts. Trained tokens count a prompt as often as it is computed,
so a prompt whose forward pass is reused by its completions counts once. FLOP are 6 x parameters x trained tokens:
recomputed activations and attention are not counted, so prefix reuse, checkpointing and longer sequences do not raise
MFU.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig

from colocated_grpo.benchmarks.roofline import Roofline
from colocated_grpo.rollout.vllm.kv_budget import kv_bytes_per_token
from colocated_grpo.types import JsonObject

StepRow = JsonObject
"""Metrics of one step. 'tokens', 'trained_tokens', 'seconds/step' and 'seconds/train' are in every row."""
Medians = dict[str, float]
"""Metric name -> median over steps."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a model that bound a step's time and memory."""

    parameters: int
    weight_bytes: int
    """Bytes of the engine's copy of the weights."""
    kv_bytes_per_token: int


def model_size(folder: Path, itemsize: int) -> ModelSize:
    """Return the sizes of the model in `folder` at `itemsize` bytes per parameter. A tied head counts once."""
    parameters = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, safe_open is no mapping
                parameters += math.prod(tensors.get_slice(name).get_shape())
    return ModelSize(
        parameters=parameters,
        weight_bytes=parameters * itemsize,
        kv_bytes_per_token=kv_bytes_per_token(AutoConfig.from_pretrained(folder), itemsize),
    )


def training_flops(size: ModelSize, tokens: float) -> float:
    return 6 * size.parameters * tokens


def with_rates(row: StepRow, size: ModelSize, rates: Roofline, ranks: int) -> StepRow:
    """Return the row with 'tokens_per_second_per_gpu' of the step and 'mfu' of its training phase."""
    flops_per_second = training_flops(size, row["trained_tokens"]) / (row["seconds/train"] * ranks)
    return {
        **row,
        "tokens_per_second_per_gpu": row["tokens"] / (row["seconds/step"] * ranks),
        "mfu": flops_per_second / rates.peak_flops_per_second,
    }


def medians(rows: Sequence[Mapping[str, object]]) -> Medians:
    """Return the median of every float that all rows have."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float):
                columns.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in columns.items() if len(values) == len(rows)}


def sync_bound(size: ModelSize, rates: Roofline, ranks: int) -> float:
    """Return the least seconds of a weight sync: gather the missing weights, then read and write all of them once."""
    gathered = size.weight_bytes * (ranks - 1) / ranks
    return rates.seconds_for_gather(gathered) + rates.seconds_for_bytes(2 * size.weight_bytes)


def generation_bound(
    size: ModelSize, rates: Roofline, ranks: int, prompt_tokens: float, completion_tokens: Sequence[int]
) -> float:
    """Return the least seconds to read weights and KV cache for decoding, with all sequences starting together.

    Each step reads all weights, and there are as many steps as the longest completion has tokens. Token n of a
    completion reads the keys and values of its prompt and of n tokens. The KV cache is assumed to be spread evenly over
    ranks. Prefill is left out.
    """
    cached = sum(n * prompt_tokens + n * (n + 1) / 2 for n in completion_tokens)
    read = max(completion_tokens) * size.weight_bytes + cached * size.kv_bytes_per_token / ranks
    return rates.seconds_for_bytes(read)


def training_bound(size: ModelSize, rates: Roofline, ranks: int, tokens: float) -> float:
    """Return the seconds of the training FLOP at the measured matmul rate."""
    return rates.seconds_for_flops(training_flops(size, tokens) / ranks)
