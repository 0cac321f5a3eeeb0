"""Settings and files of a folder's language model, which may be the text part of a multimodal model."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig

from colocated_grpo.settings.config_json import MODULES, TRAINED_AS, config_json_in, has_text_part, text_name

OUTPUT_LAYER = "lm_head.weight"
UNWANTED_FILES = ["consolidated*"]
"""Patterns of files that duplicate the weights in Mistral's own format, under other names."""

OwnName = Callable[[str], str | None]
"""Maps a tensor's name in a checkpoint to its name in the language model; None for tensors of other parts."""


def read_text_config(folder: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """Return the settings from which transformers and vLLM build only the language model in `folder`.

    Raises ValueError for a model type that transformers does not know.
    """
    whole = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    text = whole.get_text_config()
    if (module := MODULES.get((whole.model_type, text.model_type))) is None:
        return whole
    if (kind := TRAINED_AS.get(text.model_type)) is None:
        text = copy.deepcopy(text)
    else:
        entries = text.to_dict()
        rope = entries["rope_parameters"].items()
        entries["rope_parameters"] = {key: value for key, value in rope if not key.startswith("mrope_")}
        text = AutoConfig.for_model(**entries | {"model_type": kind})
    text.architectures = [module]
    text.name_or_path = whole.name_or_path
    if text.tie_word_embeddings != whole.tie_word_embeddings:
        # A config.json may contain only one of the two entries. The other entry is then transformers' default.
        text.tie_word_embeddings = not _has_output_layer(folder)
    return text


def own_names(folder: Path) -> OwnName:
    """Return the mapping from names in the checkpoint in `folder` to names in its language model."""
    whole = config_json_in(folder)
    if has_text_part(whole):
        return text_name
    blocks = whole.get("num_hidden_layers")

    def own_name(name: str) -> str | None:
        # Layers of multi-token prediction follow the last block and are not trained.
        found = re.match(r"model\.layers\.(\d+)\.", name)
        return None if found is not None and blocks is not None and int(found[1]) >= blocks else name

    return own_name


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that contain the weights under transformers' names."""
    files = sorted(folder.glob("*.safetensors"))
    return [file for file in files if not any(file.match(pattern) for pattern in UNWANTED_FILES)]


def _has_output_layer(folder: Path) -> bool:
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            if any(text_name(name) == OUTPUT_LAYER for name in tensors.keys()):  # noqa: SIM118 (no dict)
                return True
    return False
