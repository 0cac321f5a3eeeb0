"""Models of the sizes that people train, without their weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from colocated_grpo.tools.make_model import build_char_tokenizer, model_config
from colocated_grpo.tools.shapes import SHAPES

TOKENIZER = build_char_tokenizer()


def config_json(shape: str = "qwen3-8b", architecture: str | None = None) -> dict:
    """Return the config.json of a model. architecture: instead of the shape's."""
    sizes = SHAPES[shape]
    entries = {**sizes.settings, "vocab_size": sizes.vocab}
    sizes = replace(sizes, architecture=architecture or sizes.architecture, settings=entries)
    return model_config(sizes, TOKENIZER).to_dict()


def empty_model(config: dict, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return transformers' model on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    model.tie_weights()
    return model


def num_parameters(config: dict) -> int:
    return sum(parameter.numel() for parameter in empty_model(config).parameters())
