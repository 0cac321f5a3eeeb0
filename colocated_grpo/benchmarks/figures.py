"""From the seconds and tokens of steps to the figures that are compared: throughput, MFU, medians, lower bounds.

Tokens are prompt and completion tokens of real rollouts; trained ones count a prompt that siblings share as often as it
runs. FLOP are 6 x parameters x trained tokens: recomputed activations and attention are not counted, so neither sharing
nor checkpointing nor longer sequences raise a figure.
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

Row = Mapping[str, float]
"""One step. `tokens`, `trained_tokens`, `seconds/step` and `seconds/train` are in every row."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    parameters: int
    weight_bytes: int
    """Of the engine's copy."""
    kv_bytes_per_token: int


def model_size(folder: Path, itemsize: int) -> ModelSize:
    """Sizes of the model in `folder` with `itemsize` bytes a number. A tied head counts once."""
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


def with_rates(row: Row, size: ModelSize, rates: Roofline, ranks: int) -> dict[str, float]:
    """The row with its throughput and the share of the devices' peak that its training phase reached."""
    flops_per_second = training_flops(size, row["trained_tokens"]) / (row["seconds/train"] * ranks)
    return {
        **row,
        "tokens_per_second_per_gpu": row["tokens"] / (row["seconds/step"] * ranks),
        "mfu": flops_per_second / rates.peak_flops_per_second,
    }


def medians(rows: Sequence[Row]) -> dict[str, float]:
    """Median of every number that each of the rows has."""
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    return {name: statistics.median(row[name] for row in rows) for name in names if all(name in row for row in rows)}


def sync_bound(size: ModelSize, rates: Roofline, ranks: int) -> float:
    """Seconds: what a rank lacks of the engine's weights is gathered, then all of them are read and written once."""
    gathered = size.weight_bytes * (ranks - 1) / ranks
    return rates.seconds_for_gather(gathered) + rates.seconds_for_bytes(2 * size.weight_bytes)


def generation_bound(
    size: ModelSize, rates: Roofline, ranks: int, prompt_tokens: float, completion_tokens: Sequence[int]
) -> float:
    """Seconds to read what decoding must read, with every sequence decoding from the start.

    A step reads all weights, and the longest completion needs as many steps as it has tokens; token n of a completion
    reads the keys and values of its prompt and of n tokens. The cache is spread evenly over ranks. Prefill is left out.
    """
    cached = sum(n * prompt_tokens + n * (n + 1) / 2 for n in completion_tokens)
    read = max(completion_tokens) * size.weight_bytes + cached * size.kv_bytes_per_token / ranks
    return rates.seconds_for_bytes(read)


def training_bound(size: ModelSize, rates: Roofline, ranks: int, tokens: float) -> float:
    """Seconds of the FLOP at the measured matmul rate."""
    return rates.seconds_for_flops(training_flops(size, tokens) / ranks)
