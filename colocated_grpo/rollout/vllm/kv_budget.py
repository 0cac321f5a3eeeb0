"""Size of an engine's KV cache in the memory that the trainer's state leaves free."""

from dataclasses import replace
from math import ceil, prod
from pathlib import Path

import torch
from safetensors import safe_open

from colocated_grpo.errors import ConfigError, RunError
from colocated_grpo.rollout.vllm.spec import EngineSpec
from colocated_grpo.runtime.text_part import OwnName, own_names, read_text_config, weight_files
from colocated_grpo.settings.model_sizes import CACHE_BYTES, ENGINE_RESERVE, Sizes, cache_itemsize, sizes_of

GIB = 1 << 30
CPU_LIMIT = 1 * GIB
MIN_CACHE = 64 << 20
FILL_FRACTION = 0.5
"""Cache size as a fraction of the worst case (all sequences at full length at once). Completions that stop early need
less. If all completions run to full length, vLLM preempts some of them."""
MIN_FULL_SEQUENCES = 8
"""Minimum number of sequences that fit at full length."""
BLOCK = 128
"""Tokens of vLLM's largest default cache block, that of its CPU backend."""


def kv_cache_arguments(spec: EngineSpec, device: torch.device) -> dict[str, object]:
    """vLLM arguments that size the KV cache from free memory. Call after the trainer's resident state is allocated."""
    given = spec.kv_cache_memory_bytes
    if device.type == "cpu":
        one = 0 if given else useful_bytes(replace(spec, max_num_seqs=1))
        return {"kv_cache_memory_bytes": given or max(one, min(CPU_LIMIT, max(MIN_CACHE, useful_bytes(spec))))}
    if given is None and spec.gpu_memory_utilization is not None:
        return {"gpu_memory_utilization": spec.gpu_memory_utilization}
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # Even with an exact size, vLLM does not start if `gpu_memory_utilization` exceeds the free fraction after it has
    # initialised NCCL and its kernels (2.3 GiB on an H100), while other processes take memory. The value has no other
    # effect in this case.
    return {
        "kv_cache_memory_bytes": given or _size_beside(free, spec),
        "gpu_memory_utilization": round(free / total / 8, 4),
    }


def check_cache(spec: EngineSpec) -> None:
    """Raise ConfigError if the given cache cannot hold one sequence of full length: vLLM's error names other settings.

    Sliding-window layers, unknown models and caches of types without a fixed size are left to vLLM.
    """
    if (size := spec.kv_cache_memory_bytes) is None:
        return
    settings = _settings(spec.folder, trust_remote_code=spec.trust_remote_code)
    sizes = sizes_of(settings)
    known = spec.args.get("kv_cache_dtype", "auto") in ("auto", *CACHE_BYTES)
    if settings.get("sliding_window") or not known or sizes is None:
        return
    needed = spec.max_model_len * _bytes_per_token(sizes, spec)
    if size < needed:
        problem = f"one sequence of {spec.max_model_len} tokens needs {needed} bytes"
        advice = "raise it, or lower engine.max_model_len or rollout.max_completion_tokens"
        raise ConfigError(f"engine.kv_cache_memory_bytes={size}: {problem}; {advice}")


def _size_beside(free: int, spec: EngineSpec) -> int:
    """Return the automatic cache size. free: bytes available to the cache and the engine's weights together."""
    room = free - weight_bytes(spec) - ENGINE_RESERVE
    if room < MIN_CACHE:
        raise RunError(
            f"engine: {free / GIB:.1f} GiB are free beside the trainer: too little for the engine's weights and cache; "
            "set policy.cpu_offload (with an adapter: policy.lora.base_on_host), or use more GPUs; for a server, lower "
            "--max-model-len or --max-num-seqs"
        )
    return min(room, max(MIN_CACHE, useful_bytes(spec)))


def useful_bytes(spec: EngineSpec) -> int:
    """Return the KV bytes on one rank for FILL_FRACTION of spec.max_num_seqs sequences of full length."""
    sizes = model_sizes(spec.folder, trust_remote_code=spec.trust_remote_code)
    sequences = max(ceil(FILL_FRACTION * spec.max_num_seqs), min(MIN_FULL_SEQUENCES, spec.max_num_seqs))
    states = sizes.state_bytes(spec.dtype.itemsize, spec.tensor_parallel_size)
    # The last block of each sequence may be partly empty, and vLLM keeps one block for padding.
    tokens = sequences * (spec.max_model_len + BLOCK) + BLOCK
    # vLLM makes cache blocks as large as a state, so each sequence may leave one more block of this size partly empty.
    return _bytes_per_token(sizes, spec) * tokens + 2 * states * spec.max_num_seqs


def _bytes_per_token(sizes: Sizes, spec: EngineSpec) -> int:
    return sizes.kv_bytes_per_token(cache_itemsize(spec.args, spec.dtype.itemsize), spec.tensor_parallel_size)


def model_sizes(folder: Path, *, trust_remote_code: bool = False) -> Sizes:
    """Return the sizes of the language model in `folder`. Raises RunError if config.json does not state the sizes."""
    sizes = sizes_of(_settings(folder, trust_remote_code=trust_remote_code))
    if sizes is None:
        raise RunError(f"engine: the sizes of the model in {folder} are unknown; set engine.kv_cache_memory_bytes")
    return sizes


def _settings(folder: Path, *, trust_remote_code: bool) -> dict[str, object]:
    """Return the settings of the language model, with transformers' defaults for settings missing in config.json."""
    text = read_text_config(folder, trust_remote_code=trust_remote_code).get_text_config()
    settings = text.to_dict()
    return settings | {name: settings[own] for name, own in text.attribute_map.items() if own in settings}


def weight_bytes(spec: EngineSpec) -> int:
    """Return the bytes of the model's weights on one rank of the engine, in the engine's type."""
    if files := weight_files(spec.folder):
        own_name = own_names(spec.folder)
        total = sum(_count_elements(file, own_name) for file in files) * spec.dtype.itemsize
    else:  # pickled files give no element count before they are read; assume 16 bits, the smallest type in use
        total = sum(file.stat().st_size for file in spec.folder.glob("pytorch_model*.bin")) * spec.dtype.itemsize // 2
    return total // spec.tensor_parallel_size


def _count_elements(file: Path, own_name: OwnName) -> int:
    with safe_open(file, framework="pt") as tensors:
        return sum(prod(tensors.get_slice(name).get_shape()) for name in filter(own_name, tensors.keys()))
