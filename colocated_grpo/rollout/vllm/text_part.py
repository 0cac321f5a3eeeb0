"""vLLM for the text part of a vision-language model: its settings, and its tensors in the whole model's checkpoint."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import vllm
from torch import Tensor, nn
from transformers import PretrainedConfig
from vllm import ModelRegistry
from vllm.config.load import LoadConfig
from vllm.config.model import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from colocated_grpo.rollout.vllm import without_torchvision
from colocated_grpo.runtime.text_part import read_text_config
from colocated_grpo.settings.config_json import MODULES, text_name
from colocated_grpo.settings.errors import ConfigError

LOAD_FORMAT = "text_part"


@register_model_loader(LOAD_FORMAT)
class TextPartLoader(DefaultModelLoader):
    """Reads the tensors of the text part under the names that it has alone."""

    def __init__(self, load_config: LoadConfig) -> None:
        # "auto" would prefer the files of Mistral's own format, if the folder has them too.
        super().__init__(dataclasses.replace(load_config, load_format="hf"))

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Generator[tuple[str, Tensor], None, None]:
        for name, tensor in super().get_all_weights(model_config, model):
            own = text_name(name)
            if own is not None:
                yield own, tensor


def register_class(folder: Path, config_json: Mapping[str, Any]) -> None:
    """Make vLLM's class of this text model usable, stored alone or as a part of a whole model.

    Raises ConfigError if vLLM has none.

    vLLM 0.32 has one for Qwen 3.5; vLLM 0.26 does not, and would build the whole model.
    """
    kind = (config_json.get("text_config") or config_json).get("model_type")
    module = next((module for (_, text_type), module in MODULES.items() if text_type == kind), None)
    if module is None:
        return
    if module not in ModelRegistry.get_supported_archs():
        raise ConfigError(
            f"model.name={str(folder)!r}: vLLM {vllm.__version__} has no {module}; install a later version of vLLM"
        )
    without_torchvision.register(module)


def text_part_arguments(folder: Path, arguments: Mapping[str, Any], *, trust_remote_code: bool) -> dict[str, Any]:
    """Return replacements of the arguments with which vLLM would build and read the whole model in `folder`."""
    text = read_text_config(folder, trust_remote_code=trust_remote_code)
    return {
        "hf_overrides": partial(_text_alone, text, arguments["hf_overrides"]),
        "load_format": "dummy" if arguments["load_format"] == "dummy" else LOAD_FORMAT,
    }


def _text_alone(text: PretrainedConfig, entries: dict[str, Any], config: PretrainedConfig) -> PretrainedConfig:
    """Return the text part's settings, with `entries`, in place of the whole model's.

    config: the whole model's, or a stand-in with which vLLM asks whether the model type changes.
    """
    if config.get_text_config() is config:
        return config
    text = copy.deepcopy(text)
    text.update(entries)
    return text
