"""How many sequences decode together, and their KV cache: what the trainer leaves free, no larger than they can use."""

from __future__ import annotations

from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig

from colocated_grpo.config.schema import Config
from colocated_grpo.errors import RunError

GIB = 1 << 30
MOST_SEATS = 512
FEWEST_SEATS = 64
"""Of a small share, for held-out prompts that are more."""
SEATS_OF_SERVERS = 256
"""Where other processes send requests, as many as they like."""
CAPTURED = 16
"""Every multiple of it has a CUDA graph; a batch between the largest graph and max_num_seqs decodes without one."""
ENGINE_RESERVE = 6 * GIB
"""Kept free for the engine's activations, sampler, CUDA graphs and fragmentation."""
CPU_LIMIT = 1 * GIB
SMALLEST = 64 << 20
FILLED = 0.5
"""Share of the worst case, all sequences at full length at one time, that the cache is made for. Completions that stop
by themselves fill less; where all run to the end, the engine makes some of them wait their turn."""
FEW = 8
"""So many sequences always have room for their full length."""
BLOCK = 64
"""Tokens by which a sequence's last cache block may exceed it."""


def with_seats(config: Config, ranks: int) -> Config:
    """The same with a number for engine.max_num_seqs: an engine's share of a step, where the user names none."""
    if config.engine.max_num_seqs is not None:
        return config
    rollout = config.rollout
    engines = 1 if rollout.generation == "replicated" else ranks // config.engine.tensor_parallel_size
    share = ceil(rollout.prompts_per_step / engines) * rollout.group_size  # whole groups are dealt
    seats = min(max(ceil(share / CAPTURED) * CAPTURED, FEWEST_SEATS), MOST_SEATS)
    if config.atropos is not None:
        seats = SEATS_OF_SERVERS
    return config.model_copy(update={"engine": config.engine.model_copy(update={"max_num_seqs": seats})})


def kv_cache_arguments(config: Config, folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """vLLM arguments that size the KV cache. The trainer's resident state must be allocated before this is called."""
    engine = config.engine
    if device.type == "cpu":
        size = engine.kv_cache_memory_bytes or min(CPU_LIMIT, max(SMALLEST, useful_bytes(config, folder, dtype)))
        return {"kv_cache_memory_bytes": size}
    if engine.kv_cache_memory_bytes is None and engine.gpu_memory_utilization is not None:
        return {"gpu_memory_utilization": engine.gpu_memory_utilization}
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    room = free - weight_bytes(config, folder, dtype) - ENGINE_RESERVE
    if room < SMALLEST:
        raise RunError(
            f"engine: {free / GIB:.1f} GiB are free beside the trainer, too little for the engine's weights and cache; "
            "set policy.cpu_offload or policy.offload_optimizer, or use more GPUs"
        )
    size = engine.kv_cache_memory_bytes or min(room, max(SMALLEST, useful_bytes(config, folder, dtype)))
    # vLLM refuses to start when its utilisation exceeds the free share, even where the exact size is given.
    return {"kv_cache_memory_bytes": size, "gpu_memory_utilization": round(0.98 * free / total, 4)}


def useful_bytes(config: Config, folder: Path, dtype: torch.dtype) -> int:
    """KV bytes on one rank of as many sequences of full length as will decode at one time; never less than one's."""
    hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code)
    bytes_per_token = kv_bytes_per_token(hf_config, dtype.itemsize, config.engine.tensor_parallel_size)
    longest = config.engine.max_model_len or config.max_sequence_tokens
    sequences = max(ceil(FILLED * config.engine.max_num_seqs), min(FEW, config.engine.max_num_seqs))
    return bytes_per_token * sequences * (longest + BLOCK)


def kv_bytes_per_token(hf_config: PretrainedConfig, itemsize: int, tensor_parallel_size: int = 1) -> int:
    """Of one token's keys and values in all layers, on one rank of the engine."""
    text = hf_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * max(1, heads // tensor_parallel_size) * head_size * itemsize


def weight_bytes(config: Config, folder: Path, dtype: torch.dtype) -> int:
    """Of the checkpoint on one rank of the engine, in the engine's own type."""
    if files := [*folder.glob("*.safetensors")]:
        whole = sum(map(_numbers_in, files)) * dtype.itemsize
    else:  # what these hold is known after reading them; no type in use is smaller than 16 bits
        whole = sum(file.stat().st_size for file in folder.glob("pytorch_model*.bin")) * dtype.itemsize // 2
    return whole // config.engine.tensor_parallel_size


def _numbers_in(file: Path) -> int:
    with safe_open(file, framework="pt") as tensors:
        return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 (no dict)
