"""Names of the layers that TRL's trainer wraps with FSDP."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def name_present_layers(model: nn.Module) -> None:
    """Remove layer classes that the model does not contain from its list of classes for FSDP.

    accelerate raises ValueError at the first missing class, and transformers lists vision blocks for text models too.
    """
    present = {type(module).__name__ for module in model.modules()}
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._no_split_modules:
            module._no_split_modules = present.intersection(module._no_split_modules)
