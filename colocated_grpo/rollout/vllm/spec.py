"""`EngineSpec`: build parameters of engines for training, serving, evaluation and chat. Imports no vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Literal

import torch

MAX_NUM_SEQS = 512
MIN_NUM_SEQS = 64
"""Minimum for small batches: there may be more held-out prompts than training prompts."""
SERVER_NUM_SEQS = 256
"""For engines that receive any number of requests from other processes."""
GRAPH_STEP = 16
"""vLLM captures a CUDA graph for every multiple of this number. Batches above the largest decode without one."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine: its model, its sizes, and the features that its weights and requests need."""

    folder: Path
    dtype: torch.dtype
    """Type of the weights."""
    max_model_len: int
    """Longest sequence in tokens, prompt and completion together."""
    max_num_seqs: int
    """Sequences that decode together."""
    trust_remote_code: bool = False
    seed: int = 0
    tensor_parallel_size: int = 1
    kv_cache_memory_bytes: int | None = None
    """None: sized from the free memory. Takes precedence over gpu_memory_utilization."""
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    reads_weights: bool = False
    """Load the weights in `folder`. False: the first sync writes them; only the trainer reads the checkpoint."""
    sleep: bool = True
    """Free memory in `sleep`. No effect on the CPU."""
    keeps_weights: bool = False
    """Only the KV cache sleeps. False: the weights are written again after each sleep."""
    needs_tokenizer: bool = False
    """Requests may have stop strings, which are found in text, or patterns, whose grammars need the tokenizer."""
    records_routes: bool = False
    """Requests may ask for the experts that their tokens chose."""
    numerics: Literal["fast", "exact"] = "fast"
    """exact: the result of a token does not depend on the tokens computed with it."""
    args: Mapping[str, object] = field(default_factory=dict)
    """Further engine arguments of vLLM, which take precedence."""


def num_seqs_for(sequences: int) -> int:
    """Return the max_num_seqs of an engine that receives `sequences` at a time, rounded up to a CUDA graph."""
    return min(max(ceil(sequences / GRAPH_STEP) * GRAPH_STEP, MIN_NUM_SEQS), MAX_NUM_SEQS)
