"""The layers that a model names for the FSDP of TRL's trainer."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def name_present_layers(model: nn.Module) -> None:
    """Drop the layer classes that the model does not have from those that it names for FSDP.

    accelerate raises ValueError at the first missing one. transformers names vision blocks for text models too.
    """
    present = {type(module).__name__ for module in model.modules()}
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._no_split_modules:
            module._no_split_modules = present.intersection(module._no_split_modules)
