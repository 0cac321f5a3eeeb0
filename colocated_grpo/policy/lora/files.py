"""Adapters as files in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from colocated_grpo.errors import ConfigError
from colocated_grpo.policy.checkpoint_files import check_export
from colocated_grpo.policy.lora.weights import adapted_layers, factors_of
from colocated_grpo.policy.model import PackedLM, checkpoint_name
from colocated_grpo.settings.base import DEFAULT_INIT
from colocated_grpo.settings.inputs import ADAPTER_WEIGHTS
from colocated_grpo.settings.training import LoRAConfig


def read_factors(config: LoRAConfig, model: PackedLM) -> dict[str, Tensor]:
    """Return the tensors of the adapter that `config.init` names, by PEFT's names; empty for a new adapter.

    model: has adapters inserted. Raises ConfigError if names or shapes differ from the model's.
    """
    if config.init == DEFAULT_INIT:
        return {}
    check_export(f"policy.lora.init={config.init!r}", Path(config.init))
    file = Path(config.init) / ADAPTER_WEIGHTS
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"policy.lora.init={config.init!r}: cannot read {file.name} ({error})") from None
    expected = {name: factor.shape for name, factor in factors_of(model).items()}
    other = [*(expected.keys() - tensors.keys()), *(tensors.keys() - expected.keys())]
    if other:
        name = sorted(other)[0]
        problem = f"lacks {name}" if name in expected else f"has {name}, which the model does not"
        rule = "it was trained on another base model"
        raise ConfigError(f"policy.lora.init={config.init!r}: the adapter {problem}; {rule}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            differs = f"{name} is {tuple(tensors[name].shape)} in the adapter, but must be {tuple(shape)}"
            raise ConfigError(f"policy.lora.init={config.init!r}: {differs}; it was trained on another base model")
    return {name: tensor.float() for name, tensor in tensors.items()}


def write_adapter(folder: Path, config: LoRAConfig, base: str, model: PackedLM, factors: Mapping[str, Tensor]) -> None:
    """Write an adapter that PEFT and vLLM load. base: name of the base model. factors: by PEFT's names."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in factors.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    peft_config(config, base, model).save_pretrained(str(folder))


def peft_config(config: LoRAConfig, base: str, model: PackedLM) -> LoraConfig:
    """Return PEFT's settings that select exactly the adapted layers: by short names if possible, else by full names."""
    layers = list(adapted_layers(model))
    # PEFT declares an int, but fractions work.
    alpha: Any = int(config.alpha) if config.alpha.is_integer() else config.alpha
    settings = partial(
        LoraConfig,
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
        r=config.rank,
        lora_alpha=alpha,
        use_rslora=config.rslora,
    )
    names = sorted({name.rpartition(".")[2] for name in layers})
    brief = settings(target_modules=names, layers_to_transform=config.layers)
    modules = [checkpoint_name(name) for name, _ in model.named_modules()]
    selected = {name for name in modules if name and check_target_module_exists(brief, name)}
    return brief if selected == set(layers) else settings(target_modules=layers)
