"""Adapters in the benchmarks: one definition for our trainer, TRL and vLLM, derived from our settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from colocated_grpo.settings.base import DEFAULT_INIT
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.inputs import ADAPTER_WEIGHTS
from colocated_grpo.settings.model_support import EXPERT_COUNTS
from colocated_grpo.settings.training import ALL_LINEAR, LoRAConfig
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from peft import PeftModel

STD = 0.02
"""Standard deviation of a random adapter's entries."""


def peft_arguments(lora: LoRAConfig) -> JsonObject:
    """Return the arguments of PEFT's LoraConfig for these settings, except `layers`.

    PEFT accepts indices of blocks only together with a list of module names. Raises ConfigError for an adapter from a
    folder, because its rank and layers are not in these settings.
    """
    if lora.init != DEFAULT_INIT:
        raise ConfigError(f"policy.lora.init={lora.init!r}: benchmarks start from a new adapter; leave it out")
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": lora.target_modules,
        "exclude_modules": lora.exclude_modules,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }


def arguments_for(model_folder: Path, lora: LoRAConfig) -> JsonObject:
    """Return arguments of PEFT's LoraConfig that adapt the same layers of this model as our trainer.

    Raises ConfigError as `peft_arguments` does, and if PEFT adapts other layers: in some mixtures of experts it
    mistakes names of shared layers for names of experts.
    """
    _, arguments = _adapted(model_folder, lora)
    return arguments


def adapter_parameters(model_folder: Path, lora: LoRAConfig) -> int:
    """Return the number of parameters of our trainer's adapter."""
    return _adapter_parameters(_meta_model(model_folder), lora)


def write_random_adapter(folder: Path, model_folder: Path, lora: LoRAConfig, dtype: torch.dtype) -> None:
    """Write an adapter for the model in `model_folder` in PEFT's format, with random factors A and B."""
    adapted, _ = _adapted(model_folder, lora)
    torch.manual_seed(0)
    tensors = {name: (torch.randn(shape) * STD).to(dtype) for name, shape in _shapes(adapted, lora).items()}
    adapted.peft_config["default"].save_pretrained(str(folder))
    save_file(tensors, folder / ADAPTER_WEIGHTS)


def block_of(name: str) -> int | None:
    """Return the index of the transformer block that a parameter belongs to; None for embeddings, head and last norm.

    Example: block_of("model.layers.3.mlp.up_proj.weight") == 3
    """
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else None


def _adapted(model_folder: Path, lora: LoRAConfig) -> tuple[PeftModel, JsonObject]:
    """Return the model without storage, with adapters in all blocks, and the arguments of their LoraConfig.

    Raises ConfigError as `arguments_for` does.
    """
    from peft import LoraConfig, PeftModel, get_peft_model  # takes seconds, and full training does not need it

    from colocated_grpo.policy.lora.weights import linear_names

    model, arguments = _meta_model(model_folder), peft_arguments(lora)
    expected = _adapter_parameters(model, lora.model_copy(update={"layers": None}))
    if lora.target_modules == ALL_LINEAR and any(getattr(model.config, key, 0) for key in EXPERT_COUNTS):
        # For PEFT, 'all-linear' includes experts and routers.
        arguments["target_modules"] = sorted({name.rpartition(".")[2] for name in linear_names(model)})
    with torch.device("meta"):
        adapted = get_peft_model(model, LoraConfig(**arguments))
    assert isinstance(adapted, PeftModel)
    if expected != sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad):
        raise ConfigError(
            "policy.lora: PEFT, which TRL uses, adapts other layers of this model; name layers of attention in "
            "policy.lora.target_modules"
        )
    return adapted, arguments


def _adapter_parameters(model: PreTrainedModel, lora: LoRAConfig) -> int:
    from colocated_grpo.policy.lora.weights import target_names

    names = target_names(model, lora)
    return sum(lora.rank * sum(model.get_parameter(f"{name}.weight").shape) for name in names)


def _meta_model(model_folder: Path) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder))
    assert isinstance(model, PreTrainedModel)
    return model


def _shapes(adapted: PeftModel, lora: LoRAConfig) -> dict[str, torch.Size]:
    from peft import get_peft_model_state_dict

    tensors: dict[str, torch.Tensor] = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return {
        name: tensor.shape for name, tensor in tensors.items() if lora.layers is None or block_of(name) in lora.layers
    }
