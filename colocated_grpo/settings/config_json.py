"""Reads a model's config.json: weight shapes, maximum sequence length and text part."""

import json
import socket
from pathlib import Path

from colocated_grpo.errors import ConfigError
from colocated_grpo.settings.generation import ModelConfig
from colocated_grpo.types import JsonObject

HUB_TIMEOUT_SECONDS = 5.0
_SHAPE_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
_SIZES = (
    "hidden_size", "n_embd", "intermediate_size", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
MAX_SIZE = 1 << 24
"""Maximum of each size in a config.json: 60 times the largest vocabulary of a released model."""
_TYPES = {"model_type": (str, "text"), "layer_types": (list, "a list")}
_TYPES |= dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, "an object"))
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
"""Keys that model families use for the maximum sequence length."""


def shape_of(model: JsonObject) -> JsonObject:
    """Return the entries of a config.json that determine the weights' shapes. Those with a default may be missing."""
    text = text_part(model)
    return {key: text[key] for key in _SHAPE_KEYS if text.get(key) is not None}


def first_difference(one: JsonObject, other: JsonObject) -> str | None:
    """Return the first key whose values differ. A key of only one shape is skipped: the other may use its default."""
    return next((key for key in one if key in other and one[key] != other[key]), None)


def read_config_json(model: ModelConfig, key: str = "model.name") -> JsonObject:
    """Return the model's config.json, from its folder, the local cache or the Hub. Error lines name `key`."""
    path = _local_config(model, key) or _hub_config(model, key)
    setting = f"{key}={model.name!r}"
    try:
        config_json = config_json_in(path.parent)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{setting}: {path.name} is not valid JSON ({error})") from None
    _check_entries(config_json, f"{setting}: {path.name}")
    if config_json.get("text_config") is not None:
        _check_entries(config_json["text_config"], f"{setting}: text_config in {path.name}")
    return config_json


def _check_entries(entries: object, where: str) -> None:
    """Raise ConfigError unless the entries that are read before the model is built have the right types and bounds."""
    if not isinstance(entries, dict):
        raise ConfigError(f"{where}: must be an object, not {entries!r:.60}")
    for key, (kind, name) in _TYPES.items():
        if entries.get(key) is not None and not isinstance(entries[key], kind):
            raise ConfigError(f"{where}: {key}={entries[key]!r:.60}: must be {name}")
    for key in _SIZES:
        value = entries.get(key)
        for size in value if isinstance(value, list) else [value]:  # some families have a size for each layer
            if size is not None and not (isinstance(size, int) and 1 <= size <= MAX_SIZE):
                raise ConfigError(f"{where}: {key}={size!r:.60}: must be a whole number from 1 to {MAX_SIZE}")


def config_json_in(folder: Path) -> JsonObject:
    """Return a model folder's config.json, which an earlier check has read. Raises OSError or ValueError."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _local_config(model: ModelConfig, key: str) -> Path | None:
    """Return the config.json of a local folder; None if the name can only be a repository on the Hub."""
    folder, setting = Path(model.name), f"{key}={model.name!r}"
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            wanted = "expected a saved transformers model"
            if (folder / "adapter_config.json").is_file():
                wanted = "it is an adapter: merge it into its base model (checkpoint.export_merged: true)"
                if key == "model.name":
                    wanted = f"it is an adapter: name its base model, and set policy.lora.init: {folder}"
            elif (exported := folder / "final_model").is_dir():
                wanted = f"it is the folder of a run, whose model is {exported}"
            raise ConfigError(f"{setting}: no config.json in this folder; {wanted}")
        if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
            raise ConfigError(f"{setting}: no weights in this folder (*.safetensors or *.bin)")
        return folder / "config.json"
    if folder.is_file():
        convert = " (convert GGUF with transformers: from_pretrained(FOLDER, gguf_file=FILE).save_pretrained(OUT))"
        advice = convert * (folder.suffix == ".gguf")
        raise ConfigError(f"{setting}: a file; expected the folder of a transformers model{advice}")
    if folder.is_absolute() or model.name.startswith((".", "~")) or model.name.count("/") > 1:
        raise ConfigError(f"{setting}: no such folder")
    return None


def _hub_config(model: ModelConfig, key: str) -> Path:
    from huggingface_hub import constants, errors, hf_hub_download, try_to_load_from_cache

    setting = f"{key}={model.name!r}"
    name = f"{setting}: no such folder"
    try:
        cached = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
        if isinstance(cached, str):
            return Path(cached)
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(f"{name}, not in the local cache, and HF_HUB_OFFLINE is set")
        _reach(constants.ENDPOINT)
        revision, timeout = model.revision, HUB_TIMEOUT_SECONDS
        return Path(hf_hub_download(model.name, "config.json", revision=revision, etag_timeout=timeout))
    except errors.HFValidationError:
        raise ConfigError(f"{name}, and not a valid Hugging Face name") from None
    except errors.GatedRepoError:
        raise ConfigError(f"{setting}: gated on the Hub; accept its terms there and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(f"{name}, and not on the Hub (or private: set HF_TOKEN)") from None
    except errors.RevisionNotFoundError:
        revision = f"{key.removesuffix('name')}revision={model.revision!r}"
        raise ConfigError(f"{revision}: {model.name} has no such branch, tag or commit") from None
    except errors.RemoteEntryNotFoundError:
        raise ConfigError(f"{setting}: no config.json on the Hub; expected a transformers model") from None
    except (errors.HTTPError, OSError) as error:
        reason = str(error).split("\n")[0].split(". ")[0]
        raise ConfigError(f"{name}, not in the local cache, and the Hub cannot be reached ({reason})") from None


def _reach(endpoint: str) -> None:
    """Raise OSError at once if the Hub's host accepts no connection. huggingface_hub would retry first."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    if getproxies():
        return  # the proxy resolves the name and connects, not this process
    address = urlsplit(endpoint)
    port = address.port or (80 if address.scheme == "http" else 443)
    socket.create_connection((address.hostname or "", port), timeout=HUB_TIMEOUT_SECONDS).close()


def longest_sequence(model: JsonObject) -> int | None:
    """Return the maximum sequence length in a config.json, after rope scaling; None if it has no such entry."""
    positions = next((model[key] for key in _POSITION_KEYS if isinstance(model.get(key), int)), None)
    rope = model.get("rope_scaling") or model.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type"))
    final = kind in (None, "default", "longrope", "su", "llama3") or model.get("model_type") == "gemma3_text"
    if positions is None or final:
        return positions  # rope scaling does not extend it, or the value is already the extended length
    return int(max(positions, rope.get("original_max_position_embeddings", positions) * rope.get("factor", 1)))


def original_positions(model: JsonObject) -> int | None:
    """Return the length up to which longrope uses the same table for every batch; None for other kinds of rope.

    Longrope has two tables. Above this length, transformers chooses a table for each batch, by the longest sequence of
    the batch. vLLM chooses a table once, by engine.max_model_len.
    """
    rope = model.get("rope_scaling") or model.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return None
    key = "original_max_position_embeddings"
    return rope.get(key) or model.get(key)


MODULES = {
    ("gemma3", "gemma3_text"): "Gemma3ForCausalLM",
    ("gemma4", "gemma4_text"): "Gemma4ForCausalLM",
    ("mistral3", "ministral3"): "Ministral3ForCausalLM",
    ("mistral3", "mistral"): "MistralForCausalLM",
    ("qwen3_vl", "qwen3_vl_text"): "Qwen3ForCausalLM",
    ("qwen3_5", "qwen3_5_text"): "Qwen3_5ForCausalLM",
    ("qwen3_5_moe", "qwen3_5_moe_text"): "Qwen3_5MoeForCausalLM",
}
"""Model types of a multimodal model and of its text part -> class of the text part in transformers and vLLM. For text
input, the text part alone computes the same as the whole model. In other pairs, the whole model may add computation."""
TRAINED_AS = {"qwen3_vl_text": "qwen3"}
"""Model type of a text part -> an equivalent type for text. Qwen3-VL has three positions, equal without images."""
_GEMMA3 = {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208}
DEFAULTS: dict[object, JsonObject] = {"gemma3_text": _GEMMA3 | {"max_position_embeddings": 131072}}
"""Model type -> transformers' defaults for entries that are missing in the config.json of released models."""
OTHER_PARTS = {"vision_config": "vision", "audio_config": "audio"}
"""Section of config.json -> name of the part."""
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
"""Name prefixes in multimodal checkpoints -> prefixes in the text model. Gemma 3 and Mistral 3 use the second and third
entry, Gemma 4 and Qwen use the first and last entry."""


def has_text_part(config_json: JsonObject) -> bool:
    """Return True for a multimodal model whose text part can be trained alone."""
    text = config_json.get("text_config") or {}
    return (config_json.get("model_type"), text.get("model_type")) in MODULES


def text_part(config_json: JsonObject) -> JsonObject:
    """Return the settings of the language model in a config.json."""
    text = config_json.get("text_config") or config_json
    if (kind := text.get("model_type")) in TRAINED_AS:
        text = {**text, "model_type": TRAINED_AS[kind]}
    return {**DEFAULTS.get(kind, {}), **text}


def attention_heads(text: JsonObject) -> int | None:
    """Return a language model's number of attention heads; None if the settings do not state the number."""
    return text.get("num_attention_heads") or text.get("n_head")


def left_out(config_json: JsonObject) -> str:
    """Return the untrained parts as text, such as '; its vision and audio parts are left out'; empty if none."""
    names = [name for key, name in OTHER_PARTS.items() if config_json.get(key)]
    if not names or not has_text_part(config_json):
        return ""
    return f"; its {' and '.join(names)} part{'s are' if len(names) > 1 else ' is'} left out"


def text_name(stored_name: str) -> str | None:
    """Map a tensor's name in a multimodal checkpoint to its name in the text part; None for tensors of other parts."""
    for stored, own in _PREFIXES.items():
        if stored_name.startswith(stored):
            return own + stored_name.removeprefix(stored)
    return None
