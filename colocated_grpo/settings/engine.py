"""Settings of the vLLM engines."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from colocated_grpo.settings.base import FileName, Number, Positive, Section


class EngineConfig(Section):
    placement: Literal["colocated", "server"] = "colocated"
    """colocated: every rank has an engine in its own process. server: engines run in processes of their own, on their
    own GPUs, and serve over HTTP."""
    bridge: Literal["broadcast", "shared", "adapter", "restart"] = "broadcast"
    """Way in which weights reach the servers. broadcast: over NCCL, or gloo on the CPU. shared: trainer and server
    compute with one copy in memory. adapter: the server loads the saved adapter (policy.lora). restart: the server
    starts again with a saved model. No effect with `placement: colocated`."""
    urls: list[str] = []
    """Addresses of running servers (python -m colocated_grpo.servers). Empty: the launcher starts them."""
    api_key_variable: str | None = None
    """Name of the environment variable with the API key of the servers."""
    bridge_config: FileName | None = None
    """With `bridge: shared`: path of the server's vllm_bridge_config.json. Default: in $LOGDIR, else in the working
    directory."""
    server_timeout: Number = Field(600.0, gt=0)
    """Seconds to wait for a server that starts, restarts or does not answer. Then the run saves and ends."""
    tensor_parallel_size: Positive = 1
    """Number of consecutive ranks that form one engine, or GPUs of one engine server. Must divide the model's attention
    heads and the number of ranks."""
    max_num_seqs: Positive | None = None
    """Sequences that one engine decodes at the same time. Default: its share of a step's completions, at least 64 and
    at most 512; 256 with an atropos environment."""
    max_model_len: Positive | None = None
    """Longest prompt plus completion in tokens, reduced to the model's own limit. Default: rollout.max_prompt_tokens +
    rollout.max_completion_tokens."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the engine's weights. auto: policy.compute_dtype."""
    gpu_memory_utilization: Number | None = Field(None, gt=0, le=1)
    """Fraction of the GPU's memory for the engine, as in vLLM. Default: the KV cache is sized from the memory that the
    trainer leaves free, and not larger than its sequences can use."""
    kv_cache_memory_bytes: Positive | None = None
    """Exact size of the KV cache in bytes. Takes precedence over gpu_memory_utilization."""
    enforce_eager: bool = False
    """Decode without CUDA graphs: the engine starts faster and decodes more slowly."""
    sleep: bool = True
    """Free the engine's weights and KV cache while the policy trains. With `weights: shared` or sync_frequency above 1,
    the weights stay on the device. No effect on CPU."""
    args: dict[str, Any] = {}
    """Further vLLM engine arguments, passed unchanged. Example: {quantization: fp8}."""
