"""Settings of adapters (LoRA): those of PEFT's LoraConfig that apply to linear layers, under plain names."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from colocated_grpo.settings.base import DEFAULT_INIT, InputFile, Number, Positive, Section
from colocated_grpo.settings.layers import Layers

ALL_LINEAR = "all-linear"
LEARNING_RATE = 1e-5
"""Default of policy.lr with adapters: ten times that of full training, the ratio that "LoRA Without Regret" (Schulman
et al., 2025) found for reinforcement learning, nearly independent of the rank."""


def no_dropout(value: float) -> float:
    """Return `value`; raise ValueError if it is not 0."""
    if value != 0:
        raise ValueError("must be 0: the engine samples without dropout, so training with it would not be on-policy")
    return value


def _valid_pattern(value: list[str] | str | None) -> list[str] | str | None:
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is no regular expression ({error})") from None
    return value


Modules = Annotated[list[str] | str, AfterValidator(_valid_pattern)]
"""Names of modules, or a regular expression for their whole names."""


class LoRAConfig(Section):
    rank: Positive = 32
    """Columns of B and rows of A (PEFT's r). Reinforcement learning needs little capacity: 8 to 32 suffice."""
    alpha: Number = Field(32.0, gt=0)
    """The product B @ A is multiplied by alpha / rank, so the best learning rate hardly depends on the rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (PEFT's use_rslora)."""
    target_modules: Modules = ALL_LINEAR
    """Layers with adapters, as in PEFT: all-linear (all linear layers but the output layer), a list of names
    ([q_proj, v_proj]), or a regular expression that must match the whole name of a module."""
    exclude_modules: Modules | None = None
    """Names or a regular expression, as in target_modules, of layers to leave out."""
    layers: Layers | None = None
    """Transformer blocks with adapters: 20-31, 0-3,28-31 or a list of numbers. Default: all."""
    dropout: Annotated[float, AfterValidator(no_dropout)] = 0.0
    """Accepted as 0 only."""
    init: InputFile = DEFAULT_INIT
    """default: A is drawn uniformly, B is zero, as in PEFT. Otherwise the folder of a PEFT adapter to continue from,
    which also sets rank, alpha, rslora, target_modules, exclude_modules and layers."""
    base_on_host: bool = False
    """Keep the base weights in host memory, where only the merge after each optimizer step reads them: frees 2 bytes
    per adapted parameter on the GPU and costs their copy to it, once per optimizer step."""

    @property
    def scale(self) -> float:
        """Factor of the product B @ A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def set_by_user(self) -> dict[str, Any]:
        """Return the settings that were given, without defaults."""
        return {name: getattr(self, name) for name in self.model_fields_set}
