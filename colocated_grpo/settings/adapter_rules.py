"""Rules between `policy.lora` and other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from colocated_grpo.settings.layers import layers_text
from colocated_grpo.settings.schema import Config

Lines = Iterator[str]


def _adapter_is_all_that_is_trained(config: Config) -> Lines:
    policy = config.policy
    if policy.lora is None:
        return
    if policy.train_layers is not None:
        yield (
            f"policy.train_layers={layers_text(policy.train_layers)}: must be null with policy.lora, which freezes all "
            "weights of the model; set policy.lora.layers for the blocks that get an adapter"
        )
    if policy.cpu_offload:
        yield (
            "policy.cpu_offload=true: must be false with policy.lora, whose forward pass reads the merged weights on "
            "the device; set policy.lora.base_on_host to keep the base weights in host memory"
        )
    if policy.load_balancing:
        yield (
            f"policy.load_balancing={policy.load_balancing:g}: must be 0 with policy.lora, which freezes the routers"
        )


def _merged_export_needs_an_adapter(config: Config) -> Lines:
    if config.checkpoint.export_merged and config.policy.lora is None:
        yield (
            "checkpoint.export_merged=true: must be false without policy.lora, as final_model/ and step_N/ are whole "
            "models then"
        )


ADAPTER_RULES: tuple[Callable[[Config], Lines], ...] = (
    _adapter_is_all_that_is_trained,
    _merged_export_needs_an_adapter,
)
