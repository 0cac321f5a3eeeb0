"""Rules of `numerics: exact`: the devices, models and settings that it supports."""

from collections.abc import Iterator

from colocated_grpo.errors import ConfigError
from colocated_grpo.settings.config_json import text_part
from colocated_grpo.settings.generation import RESHAPING
from colocated_grpo.settings.model_support import head_sizes
from colocated_grpo.settings.schema import EngineConfig, PolicyConfig, RolloutConfig
from colocated_grpo.types import JsonObject

MIXTURES = frozenset(("olmoe", "qwen3_moe"))
EXACT_TYPES = MIXTURES | {"gemma3_text", "llama", "mistral", "qwen2", "qwen3"}
"""Model types that `numerics: exact` supports."""
HEADS, ROTATIONS = {64, 128, 256}, {"default", "linear", "llama3"}


def problems(policy: PolicyConfig, engine: EngineConfig, rollout: RolloutConfig, structured: bool) -> Iterator[str]:
    """Yield a line for each setting with which engine and policy compute different log-probabilities."""
    unset = ("quantization", "kv_cache_dtype", "compilation_config")
    unset += ("attention_backend", "attention_config", "moe_backend", "kernel_config")  # of other kernels
    needed = {
        "engine.placement": (engine.placement, "colocated"),
        "engine.tensor_parallel_size": (engine.tensor_parallel_size, 1),
        "engine.dtype": (engine.dtype, "auto"),
        **{f"engine.args.{name}": (engine.args.get(name), None) for name in unset},
        "engine.args.use_fp64_gumbel": (engine.args.get("use_fp64_gumbel") or None, None),
        "policy.compile": (policy.compile or "auto", "auto"),
        "policy.context_parallel": (policy.context_parallel, 1),
        "policy.routing_replay": (policy.routing_replay, False),
        "rollout.partial": (None if rollout.partial is None else "...", None),
        **{f"rollout.{name}": (getattr(rollout, name), getattr(RolloutConfig(), name)) for name in RESHAPING},
    }
    for key, (value, wanted) in needed.items():
        if value != wanted:
            yield f"{key}={value}: must be {'unset' if wanted is None else wanted} with numerics: exact"
    if structured:
        yield "numerics=exact: not possible with structured: true, where the engine skips tokens; leave it out"


def check_exact(config_json: JsonObject, *, on_cpu: bool, on_hopper: bool, float32: bool) -> None:
    """Raise ConfigError with one line if `numerics: exact` does not support the device, the type or the model."""
    text, setting = text_part(config_json), "numerics=exact"
    if not (on_cpu or on_hopper):
        rule = "needs a Hopper GPU (H100, H200): tensor cores of others, not tested, may add in another order"
        raise ConfigError(f"{setting}: {rule}; set it to fast")
    if on_hopper and float32:
        raise ConfigError(f"{setting}: needs 16 bit on GPUs; set policy.compute_dtype: bfloat16")
    if on_cpu and not float32:
        rule = "16-bit norms of vLLM's engine for CPUs round differently from the policy's"
        raise ConfigError(f"{setting}: {rule}; set policy.compute_dtype: float32")
    if (kind := text.get("model_type")) not in EXACT_TYPES:
        rule = f"model type {kind!r} is not supported, only {', '.join(sorted(EXACT_TYPES))}"
        raise ConfigError(f"{setting}: {rule}; set it to fast")
    if on_cpu and kind in MIXTURES:
        raise ConfigError(f"{setting}: vLLM's engine for CPUs packs the weights of experts; set it to fast")
    if not head_sizes(config_json) <= HEADS:
        rule = f"heads of {max(head_sizes(config_json))}; attention needs 64, 128 or 256"
        raise ConfigError(f"{setting}: {rule}; set it to fast")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for each in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        if (rotation := each.get("rope_type", each.get("type", "default"))) not in ROTATIONS:
            rule = f"rotary embedding {rotation!r}; supported: {', '.join(ROTATIONS)}"
            raise ConfigError(f"{setting}: {rule}; set it to fast")
