"""Number of sequences that decode together, and the size of their KV cache beside the trainer's state."""

from __future__ import annotations

from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig

from colocated_grpo.errors import RunError
from colocated_grpo.runtime.text_part import OwnName, own_names, read_text_config, weight_files
from colocated_grpo.settings.schema import Config

GIB = 1 << 30
MAX_NUM_SEQS = 512
MIN_NUM_SEQS = 64
"""For small batches: held-out prompts may be more than training prompts."""
SERVER_NUM_SEQS = 256
"""For engines that other processes send any number of requests to."""
GRAPH_STEP = 16
"""vLLM captures a CUDA graph for every multiple. Batches above the largest graph decode without one."""
ENGINE_RESERVE = 6 * GIB
"""Kept free for the engine's activations, sampler, CUDA graphs and fragmentation."""
CPU_LIMIT = 1 * GIB
MIN_CACHE = 64 << 20
FILL_FRACTION = 0.5
"""Part of the worst case (all sequences at full length at once) that the cache is sized for. Completions that stop
early need less. If all run to full length, vLLM preempts some of them."""
MIN_FULL_SEQUENCES = 8
"""Sequences that always fit at full length."""
STATE_ITEMSIZE = 4
"""vLLM keeps recurrent states in float32 or in the model's type."""
BLOCK = 64
"""Upper bound of the tokens by which a sequence's last cache block exceeds the sequence."""


def with_max_num_seqs(config: Config, ranks: int) -> Config:
    """Set engine.max_num_seqs where the user left it open: one engine's part of a step's completions."""
    if config.engine.max_num_seqs is not None:
        return config
    rollout = config.rollout
    engines = 1 if rollout.generation == "replicated" else ranks // config.engine.tensor_parallel_size
    per_engine = ceil(rollout.prompts_per_step / engines) * rollout.group_size  # groups are not split
    return with_sequences(config, SERVER_NUM_SEQS if config.atropos is not None else per_engine)


def with_sequences(config: Config, sequences: int) -> Config:
    """Set engine.max_num_seqs for an engine that receives `sequences` at a time, rounded up to a CUDA graph."""
    size = min(max(ceil(sequences / GRAPH_STEP) * GRAPH_STEP, MIN_NUM_SEQS), MAX_NUM_SEQS)
    return config.model_copy(update={"engine": config.engine.model_copy(update={"max_num_seqs": size})})


def kv_cache_arguments(config: Config, folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """vLLM arguments that size the KV cache from free memory. Call after the trainer's resident state is allocated."""
    engine, given = config.engine, config.engine.kv_cache_memory_bytes
    if given is not None:
        _check_holds_a_sequence(given, config, folder, dtype)
    if device.type == "cpu":
        size = given or min(CPU_LIMIT, max(MIN_CACHE, useful_bytes(config, folder, dtype)))
        return {"kv_cache_memory_bytes": size}
    if given is None and engine.gpu_memory_utilization is not None:
        return {"gpu_memory_utilization": engine.gpu_memory_utilization}
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    size = given or _size_beside(free, config, folder, dtype)
    # Even if the exact size is given, vLLM does not start if its utilisation exceeds the fraction that is free after it
    # has initialised NCCL and its kernels (2.3 GiB on an H100). It uses the value for nothing else then.
    return {"kv_cache_memory_bytes": size, "gpu_memory_utilization": round(free / total / 2, 4)}


def _check_holds_a_sequence(size: int, config: Config, folder: Path, dtype: torch.dtype) -> None:
    """Raise RunError for a cache in which no sequence of full length fits: vLLM's own error names other settings.

    Layers that cache a window only, and caches of another type than the engine's, are left to vLLM.
    """
    hf_config = read_text_config(folder, trust_remote_code=config.model.trust_remote_code)
    if getattr(hf_config.get_text_config(), "sliding_window", None) or "kv_cache_dtype" in config.engine.args:
        return
    longest = config.engine.max_model_len or config.max_sequence_tokens
    needed = longest * kv_bytes_per_token(hf_config, dtype.itemsize, config.engine.tensor_parallel_size)
    if size < needed:
        raise RunError(
            f"engine.kv_cache_memory_bytes={size}: one sequence of {longest} tokens needs {needed} bytes; raise it, or "
            "lower engine.max_model_len or rollout.max_completion_tokens"
        )


def _size_beside(free: int, config: Config, folder: Path, dtype: torch.dtype) -> int:
    """Return the automatic size, for `free` bytes that the engine's weights need too."""
    room = free - weight_bytes(config, folder, dtype) - ENGINE_RESERVE
    if room < MIN_CACHE:
        raise RunError(
            f"engine: {free / GIB:.1f} GiB are free beside the trainer: too little for the engine's weights and cache; "
            "set policy.cpu_offload (with an adapter: policy.lora.base_on_host), or use more GPUs; for a server, lower "
            "--max-model-len or --max-num-seqs"
        )
    return min(room, max(MIN_CACHE, useful_bytes(config, folder, dtype)))


def useful_bytes(config: Config, folder: Path, dtype: torch.dtype) -> int:
    """KV bytes on one rank for FILL_FRACTION of engine.max_num_seqs sequences of full length."""
    hf_config = read_text_config(folder, trust_remote_code=config.model.trust_remote_code)
    bytes_per_token = kv_bytes_per_token(hf_config, dtype.itemsize, config.engine.tensor_parallel_size)
    longest = config.engine.max_model_len or config.max_sequence_tokens
    max_num_seqs = config.engine.max_num_seqs
    assert max_num_seqs is not None  # with_max_num_seqs has set it
    sequences = max(ceil(FILL_FRACTION * max_num_seqs), min(MIN_FULL_SEQUENCES, max_num_seqs))
    states = state_bytes(hf_config, dtype.itemsize, config.engine.tensor_parallel_size)
    # vLLM makes cache blocks as large as a state, so each sequence may leave one more of this size partly empty.
    return bytes_per_token * sequences * (longest + BLOCK) + 2 * states * max_num_seqs


def state_bytes(hf_config: PretrainedConfig, itemsize: int, tensor_parallel_size: int = 1) -> int:
    """Bytes of one sequence's states over all layers of linear attention, on one rank; 0 without such layers."""
    text = hf_config.get_text_config()
    layers = _layer_types(text).count("linear_attention")
    if not layers:
        return 0
    key, value = (getattr(text, f"linear_{kind}_head_dim") for kind in ("key", "value"))
    key_heads, value_heads = (getattr(text, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    window = (text.linear_conv_kernel_dim - 1) * (2 * key_heads * key + value_heads * value) * itemsize
    return layers * (window + value_heads * key * value * STATE_ITEMSIZE) // tensor_parallel_size


def _layer_types(text: PretrainedConfig) -> list[str]:
    return list(getattr(text, "layer_types", None) or [])


def kv_bytes_per_token(hf_config: PretrainedConfig, itemsize: int, tensor_parallel_size: int = 1) -> int:
    """Bytes of one token's keys and values over all layers, on one rank of the engine."""
    text = hf_config.get_text_config()
    layers = text.num_hidden_layers - _layer_types(text).count("linear_attention")
    if latent := getattr(text, "kv_lora_rank", None):  # keys and values of all heads are computed from it on each rank
        return layers * (latent + text.qk_rope_head_dim) * itemsize
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * layers * max(1, heads // tensor_parallel_size) * head_size * itemsize


def weight_bytes(config: Config, folder: Path, dtype: torch.dtype) -> int:
    """Bytes of the model's weights on one rank of the engine, in the engine's type."""
    if files := weight_files(folder):
        own_name = own_names(folder)
        total = sum(_count_elements(file, own_name) for file in files) * dtype.itemsize
    else:  # pickled files give no element count before they are read; assume 16 bits, the smallest type in use
        total = sum(file.stat().st_size for file in folder.glob("pytorch_model*.bin")) * dtype.itemsize // 2
    return total // config.engine.tensor_parallel_size


def _count_elements(file: Path, own_name: OwnName) -> int:
    with safe_open(file, framework="pt") as tensors:
        names = filter(own_name, tensors.keys())
        return sum(prod(tensors.get_slice(name).get_shape()) for name in names)
