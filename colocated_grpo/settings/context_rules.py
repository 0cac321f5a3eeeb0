"""Rules about policy.context_parallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.model_support import has_linear_attention
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.text_parts import attention_heads, text_part

_KV_HEADS = ("num_key_value_heads", "num_global_key_value_heads")


def context_divides_world(config: Config, world_size: int) -> Iterator[str]:
    size = config.policy.context_parallel
    if world_size % size:
        yield f"policy.context_parallel={size}: must divide the number of ranks, {world_size}"


def context_without_load_balancing(config: Config) -> Iterator[str]:
    size = config.policy.context_parallel
    if size > 1 and config.policy.load_balancing:
        yield (
            f"policy.context_parallel={size}: not supported with policy.load_balancing, whose loss is not computed for "
            "parts of sequences; set one of them to its default"
        )


def check_context(model: Mapping[str, Any], size: int) -> None:
    """Raise ConfigError with one line if `size` ranks cannot split a sequence of the model with this config.json."""
    if size == 1:
        return
    setting, text = f"policy.context_parallel={size}", text_part(model)
    if has_linear_attention(model):
        raise ConfigError(
            f"{setting}: not supported with linear attention, whose recurrent state runs through the whole sequence; "
            "set it to 1"
        )
    heads = attention_heads(text) or 0
    kv_heads = [count for key in _KV_HEADS if (count := text.get(key))]
    fits = lambda ranks: heads % ranks == 0 and all(not kv % ranks or not ranks % kv for kv in kv_heads)  # noqa: E731
    if not fits(size):
        known = ", ".join(map(str, (heads, *kv_heads)))
        usable = ", ".join(str(ranks) for ranks in range(1, heads + 1) if fits(ranks))
        raise ConfigError(f"{setting}: does not divide the model's heads ({known}) evenly; use one of {usable}")
