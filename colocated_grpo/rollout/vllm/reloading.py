"""Weights in a form that vLLM can reload layer by layer, as it does for layers that it transforms after loading.

During such a reload parameters have no storage, and vLLM sees only what their own weight loaders receive. vLLM's model
of gpt-oss copies stacked experts and attention sinks into the parameters directly: the copies would be lost, and the
engine would keep the old values without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

EXPERT_STACKS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
SINKS = ".self_attn.sinks"


def reloadable(weights: Iterable[tuple[str, Tensor]], aside: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield stacked experts one by one, which vLLM 0.32 passes to the parameters' loaders, and other tensors unchanged.

    Sinks are appended to `aside` instead, to be loaded after the reload.
    """
    for name, tensor in weights:
        layer, found, stack = name.partition(".mlp.experts.")
        if found and stack in EXPERT_STACKS:
            yield from ((f"{layer}{found}{expert}.{stack}", part) for expert, part in enumerate(tensor))
        elif name.endswith(SINKS):
            aside.append((name, tensor))
        else:
            yield name, tensor
