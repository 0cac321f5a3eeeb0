"""Select the layers that get an adapter, by PEFT's rules, and replace them in a model on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers import PreTrainedModel

from colocated_grpo.policy.lora.linear import ADAPTED
from colocated_grpo.settings.base import DEFAULT_INIT
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.training import ALL_LINEAR, LoRAConfig


def insert_adapters(lm: PreTrainedModel, blocks: nn.ModuleList, config: LoRAConfig) -> None:
    """Replace the targeted layers of `lm` by layers with adapters, in place. blocks: the transformer blocks of `lm`.

    Parameters are on the meta device. Raises ConfigError if a target does not exist or is not a linear layer.
    """
    for name in target_names(lm, blocks, config):
        parent, _, leaf = name.rpartition(".")
        layer = lm.get_submodule(name)
        setattr(lm.get_submodule(parent), leaf, ADAPTED[type(layer)](layer, config.rank, config.scale))


def target_names(lm: PreTrainedModel, blocks: nn.ModuleList, config: LoRAConfig) -> list[str]:
    """Return the names of the targeted layers, in the model's order. Raises ConfigError as `insert_adapters` does."""
    linear = list(linear_names(lm))
    everything = isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR
    wanted = linear if everything else config.target_modules
    rules = LoraConfig(target_modules=wanted, exclude_modules=config.exclude_modules)
    matched = [name for name, _ in lm.named_modules() if name and check_target_module_exists(rules, name)]
    by_name = config.init == DEFAULT_INIT and isinstance(wanted, list)  # a loaded adapter may also name absent layers
    if by_name:
        _require_all_found(wanted, (name for name, _ in lm.named_modules()), linear)
    if config.layers is not None:
        chosen = {id(module) for index in config.layers for module in blocks[index].modules()}
        matched = [name for name in matched if id(lm.get_submodule(name)) in chosen]
    if not matched:
        raise ConfigError(
            f"policy.lora.target_modules={config.target_modules!r}: matches no layer; linear layers of this model: "
            f"{_kinds(linear)}"
        )
    for name in matched:
        if name not in linear:
            kind = "the output layer" if lm.get_submodule(name) is lm.get_output_embeddings() else "no linear layer"
            raise ConfigError(
                f"policy.lora.target_modules={config.target_modules!r}: {name} is {kind}; only linear layers inside "
                f"the model can have an adapter: {_kinds(linear)}"
            )
    return matched


def linear_names(lm: PreTrainedModel) -> Iterator[str]:
    """Yield the names of the layers that `all-linear` selects: every linear layer except the output layer."""
    head = lm.get_output_embeddings()
    for name, module in lm.named_modules():
        if type(module) in ADAPTED and module is not head:
            yield name


def _require_all_found(wanted: Iterable[str], names: Iterable[str], linear: list[str]) -> None:
    names = list(names)
    missing = [one for one in wanted if not any(name == one or name.endswith(f".{one}") for name in names)]
    if missing:
        raise ConfigError(
            f"policy.lora.target_modules: no module is called {missing[0]!r}; linear layers of this model: "
            f"{_kinds(linear)}"
        )


def _kinds(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
