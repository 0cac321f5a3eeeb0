"""Small vision-language models, saved by transformers' own classes, of which the text part trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from colocated_grpo.tools.make_model import build_char_tokenizer, model_config
from colocated_grpo.tools.shapes import Shape
from tests.support.families import GEMMA4, MINISTRAL3, MIXED_WINDOWS, SETTINGS, UNTIED
from tests.support.small_policy import INIT_STD, SHAPE

_SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
_TILES = {"image_size": 28, "patch_size": 14}
_GEMMA4_VISION = _SMALL | {"head_dim": 8, "global_head_dim": 8, "num_key_value_heads": 2}
_PIXTRAL = _SMALL | _TILES | {"model_type": "pixtral", "head_dim": 8}
_QWEN_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "depth": 1, "patch_size": 14}
WITH_IMAGE_TOKENS = replace(SHAPE, vocab=SHAPE.vocab + 10)
"""The last tokens stand for images, sounds and their borders; tests of text use those of SHAPE only."""
TEXT_PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", MIXED_WINDOWS, {"vision_config": _SMALL | _TILES, "mm_tokens_per_image": 4}),
    "gemma4": ("gemma4", GEMMA4, {"vision_config": _GEMMA4_VISION}),
    "mistral3": ("mistral", {}, {"vision_config": _PIXTRAL}),
    "mistral3 of ministral3": ("ministral3", MINISTRAL3 | UNTIED, {"vision_config": _PIXTRAL} | UNTIED),
    "qwen3_vl": ("qwen3", {}, {"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]}}),
    "qwen3_5": ("qwen3_5", SETTINGS["qwen3_5"], {"vision_config": _QWEN_VISION}),
    "qwen3_5_moe": ("qwen3_5_moe", SETTINGS["qwen3_5_moe"] | UNTIED, {"vision_config": _QWEN_VISION}),
}
"""Kind, which begins with the model type -> architecture of the text part, its settings, and those of the whole."""


def make_composite(
    folder: Path,
    kind: str,
    *,
    shape: Shape = WITH_IMAGE_TOKENS,
    init_std: float = INIT_STD,
    file_size: str = "5GB",
    tied: bool | None = None,
    edits: dict[str, Any] | None = None,
) -> Path:
    """Write a whole model with random weights and its tokenizer, and return `folder`.

    kind: of TEXT_PARTS. file_size: largest weight file. tied: in place of the kind's own. edits: entries of the text
    part's settings.
    """
    architecture, settings, whole = TEXT_PARTS[kind]
    tying = {} if tied is None else {"tie_word_embeddings": tied}
    whole = {"tie_word_embeddings": shape.tied} | whole | tying
    tokenizer = build_char_tokenizer(shape.vocab, shape.max_positions)
    entries = {**shape.settings, "initializer_range": init_std, **settings, **tying, **(edits or {})}
    text = model_config(replace(shape, architecture=architecture, settings=entries), tokenizer).to_dict()
    model_type = kind.split()[0]
    if model_type == "qwen3_vl":
        sections = [len(range(index, shape.head_dim // 2, 3)) for index in range(3)]
        rope = text["rope_parameters"] | {"mrope_section": sections, "mrope_interleaved": True}
        text |= {"model_type": "qwen3_vl_text", "rope_parameters": rope}
    special_tokens = _special_tokens(model_type, len(tokenizer))
    config = AutoConfig.for_model(model_type, text_config=text, **whole, **special_tokens)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():  # constants that belong to the checkpoint, which are 1 in a new model
            buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=file_size)
    tokenizer.save_pretrained(folder)
    return folder


def _special_tokens(model_type: str, vocab: int) -> dict[str, int]:
    """Return the settings that name tokens of images, as the last ones of the vocabulary."""
    names = [key for key in AutoConfig.for_model(model_type).to_dict() if key.endswith(("_token_id", "_token_index"))]
    return {name: vocab - 1 - index for index, name in enumerate(names)}


def whole_model(folder: Path) -> PreTrainedModel:
    """Return the whole model, as transformers reads it, in evaluation mode."""
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def rename_tensors(folder: Path, before: str, after: str) -> None:
    """Replace the beginning `before` of names in the checkpoint by `after`."""
    file = folder / "model.safetensors"
    tensors = {
        name.replace(before, after, 1) if name.startswith(before) else name: tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
