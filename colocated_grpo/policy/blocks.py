"""Activation checkpointing of transformer blocks, switchable for each block."""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils.checkpoint import checkpoint


class Block(ActivationWrapper):
    """Transformer block. If `checkpointed`, forward keeps only the block's input, and backward runs forward again.

    The base class looks up missing attributes on the wrapped block: models read, for example, its attention type.
    """

    def __init__(self, block: nn.Module, *, checkpointed: bool) -> None:
        super().__init__(block)
        self.checkpointed = checkpointed

    def forward(self, *args: object, **kwargs: Any) -> Any:
        block = self._checkpoint_wrapped_module
        # Test gradient mode first, so that without gradients all blocks run one compiled forward, checkpointed or not.
        if torch.is_grad_enabled() and self.checkpointed:
            # No random numbers are drawn (dropout is off), and saving the RNG state would synchronize with the device.
            return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return block(*args, **kwargs)


def blocks_of(model: nn.Module) -> list[Block]:
    """Return the prepared blocks in the order of the forward pass."""
    return [module for module in model.modules() if isinstance(module, Block)]


def set_checkpointed(model: nn.Module, count: int) -> None:
    """Checkpoint only the first `count` blocks: backward reaches them after it has freed all other activations."""
    for index, block in enumerate(blocks_of(model)):
        block.checkpointed = index < count


def num_checkpointed(model: nn.Module) -> int:
    return sum(block.checkpointed for block in blocks_of(model))
