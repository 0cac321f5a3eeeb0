"""Throughput, MFU and lower bounds of a step, from its seconds and tokens.

Tokens are the prompt and completion tokens of real rollouts. Trained tokens count a prompt as often as it is computed,
so a prompt whose forward pass is reused by its completions counts once. FLOP per trained token are 2 for each parameter
in the forward pass, 2 for its input's gradient and 2 for its own, where they are computed: 6 per parameter in full
training, 4 with adapters. Experts count by the share that a token chooses. Recomputed activations and attention are not
counted, so prefix reuse, checkpointing and longer sequences do not raise MFU.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig

from benchmarks.adapters import adapter_parameters, block_of
from benchmarks.roofline import Roofline
from colocated_grpo.rollout.vllm.kv_budget import model_sizes
from colocated_grpo.settings.model_support import EXPERT_COUNTS
from colocated_grpo.settings.policy import PolicyConfig
from colocated_grpo.types import JsonObject

StepRow = JsonObject
"""Metrics of one step. 'tokens', 'trained_tokens', 'seconds/step' and 'seconds/train' are in every row."""
Medians = dict[str, float]
"""Metric name -> median over steps."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a model that bound a step's time and memory."""

    parameters: int
    """Without adapters."""
    weight_bytes: int
    """Bytes of the engine's copy of the weights."""
    expert_bytes: int = 0
    """Those of routed experts."""
    expert_share: float = 1.0
    """Fraction of a block's experts that a token chooses."""
    kv_bytes_per_token: int
    trained_parameters: int
    """Parameters that the optimizer updates; with adapters, those of the adapters alone."""
    training_flops_per_token: int

    def bytes_read(self, tokens: float) -> float:
        """Return the expected bytes of weights that a forward pass reads, if tokens choose experts independently."""
        return self.weight_bytes - self.expert_bytes * (1 - self.expert_share) ** tokens


def model_size(folder: Path, itemsize: int, policy: PolicyConfig | None = None) -> ModelSize:
    """Return the sizes of the model in `folder` at `itemsize` bytes per parameter. A tied head counts once.

    policy: the settings that name the trained part; None: all parameters are trained.
    """
    config = AutoConfig.from_pretrained(folder)
    share = expert_share(config)
    dense, experts = parameters_by_block(folder)
    parameters = dense.total() + experts.total()
    by_block = dense + Counter({block: round(share * count) for block, count in experts.items()})
    trained, flops = parameters, 6 * by_block.total()
    if policy is not None and policy.lora is not None:
        trained = adapter_parameters(folder, policy.lora)
        # Four products with the factors, all in the backward pass: the forward pass uses merged weights.
        flops = frozen_flops(by_block, policy.lora.layers) + 4 * trained
    elif policy is not None and policy.train_layers is not None:
        trained = sum(dense[block] + experts[block] for block in policy.train_layers)
        flops = frozen_flops(by_block, policy.train_layers) + 2 * sum(by_block[block] for block in policy.train_layers)
    return ModelSize(
        parameters=parameters,
        weight_bytes=parameters * itemsize,
        expert_bytes=experts.total() * itemsize,
        expert_share=share,
        kv_bytes_per_token=model_sizes(folder).kv_bytes_per_token(itemsize),
        trained_parameters=trained,
        training_flops_per_token=flops,
    )


def expert_share(config: PretrainedConfig) -> float:
    """Return the fraction of a block's routed experts that a token chooses; 1 without any."""
    count = next((getattr(config, name) for name in EXPERT_COUNTS if getattr(config, name, None)), None)
    return config.num_experts_per_tok / count if count else 1.0


def parameters_by_block(folder: Path) -> tuple[Counter[int | None], Counter[int | None]]:
    """Return the numbers of parameters of each transformer block in the checkpoint; of all others under None.

    The first counts all but routed experts, the second these alone.
    """
    dense: Counter[int | None] = Counter()
    experts: Counter[int | None] = Counter()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, safe_open is no mapping
                counts = experts if ".experts." in name else dense
                counts[block_of(name)] += math.prod(tensors.get_slice(name).get_shape())
    return dense, experts


def frozen_flops(by_block: Counter[int | None], layers: Sequence[int] | None) -> int:
    """Return the FLOP per token of the forward pass, and of the inputs' gradients down to the first of `layers`.

    None: down to the first block.
    """
    first = min(layers) if layers else 0
    without_gradient = sum(count for block, count in by_block.items() if block is not None and block < first)
    return 2 * by_block.total() + 2 * (by_block.total() - without_gradient)


def with_rates(row: StepRow, size: ModelSize, rates: Roofline, ranks: int) -> StepRow:
    """Return the row with 'tokens_per_second_per_gpu' of the step and 'mfu' of its training phase."""
    flops_per_second = size.training_flops_per_token * row["trained_tokens"] / (row["seconds/train"] * ranks)
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
    """Return the seconds to read weights and KV cache for decoding at the rate of a copy. All sequences start together.

    Each step reads all weights except unused experts. Their number is estimated as if sequences chose experts
    independently, so for mixtures of experts the result is an estimate, not a lower bound. There are as many steps as
    the longest completion has tokens. Token n of a completion reads the keys and values of its prompt and of n tokens.
    Sequences are assumed to be spread evenly over ranks. Prefill is left out.
    """
    cached = sum(n * prompt_tokens + n * (n + 1) / 2 for n in completion_tokens)
    read, decoded = cached * size.kv_bytes_per_token / ranks, 0
    for finished, tokens in enumerate(sorted(completion_tokens)):
        read += (tokens - decoded) * size.bytes_read((len(completion_tokens) - finished) / ranks)
        decoded = tokens
    return rates.seconds_for_bytes(read)


def training_bound(size: ModelSize, rates: Roofline, ranks: int, tokens: float) -> float:
    """Return the seconds of the training FLOP at the measured matmul rate."""
    return rates.seconds_for_flops(size.training_flops_per_token * tokens / ranks)
