"""Weights that vLLM's engine would keep after a sync without an error, because it uses a transformed copy of them.

vLLM reloads layers that it transforms after loading one by one. During such a reload parameters have no storage, and
vLLM sees only what their own weight loaders receive. vLLM's model of gpt-oss copies stacked experts and attention sinks
into the parameters directly: these copies would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from colocated_grpo.errors import RunError

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


@torch.inference_mode()  # vLLM reloads some models in this mode, and its tensors can be written only in it
def refresh_sinks(model: nn.Module) -> None:
    """Copy attention sinks to the tensors that the kernels read.

    FlashInfer's kernels read a float32 copy, which vLLM makes after it has loaded all weights: not after a planned sync
    or `load_weights`, and in older releases only once. It is written in place, because CUDA graphs read it. Other
    kernels read the weight itself, which stays as it is.
    """
    for module in model.modules():
        for attention in module.children():
            kept = getattr(getattr(attention, "impl", None), "sinks", None)
            if kept is None:
                continue
            weights = [weight for weight in module.parameters(recurse=False) if weight.shape == kept.shape]
            if len(weights) != 1:
                raise RunError(f"engine: attention sinks of {type(module).__name__} are not supported")
            kept.copy_(weights[0])
