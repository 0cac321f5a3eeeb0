"""Transformer blocks that can recompute their activations, one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils.checkpoint import checkpoint


class Block(ActivationWrapper):
    """One transformer block. While `checkpointed`, its forward keeps only its input; backward runs it again.

    The base class hands missing attributes through: models ask their blocks for the kind of attention, for example.
    """

    def __init__(self, block: nn.Module, *, checkpointed: bool) -> None:
        super().__init__(block)
        self.checkpointed = checkpointed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block = self._checkpoint_wrapped_module
        # Gradients first: without them both kinds of blocks share one compiled forward.
        if torch.is_grad_enabled() and self.checkpointed:
            # Nothing draws random numbers (dropout is off), and saving the generator's state would wait for the device.
            return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return block(*args, **kwargs)


def blocks_of(model: nn.Module) -> list[Block]:
    """In the order of the forward pass."""
    return [module for module in model.modules() if isinstance(module, Block)]


def set_checkpointed(model: nn.Module, count: int) -> None:
    """Let the first `count` blocks recompute: the others' activations are gone when backward reaches these."""
    for index, block in enumerate(blocks_of(model)):
        block.checkpointed = index < count


def num_checkpointed(model: nn.Module) -> int:
    return sum(block.checkpointed for block in blocks_of(model))
