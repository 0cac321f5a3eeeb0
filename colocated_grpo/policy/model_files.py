"""The files of a model's folder except its weights: settings, tokenizer and the tokens that end a completion."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from colocated_grpo.errors import ConfigError, in_one_line
from colocated_grpo.policy.checkpoint_files import fetch_model, fetch_tokenizer
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.config_json import config_json_in, shape_of, text_part
from colocated_grpo.settings.inputs import is_inline
from colocated_grpo.settings.schema import ModelConfig
from colocated_grpo.settings.training import PolicyConfig, trained_shape
from colocated_grpo.types import JsonObject

PROCESSOR_TEMPLATE = "chat_template.json"
"""File with the chat template of older vision-language models. transformers reads this file only for a processor."""


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Everything that is read from the model's folder except the weights."""

    folder: Path
    hf_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    """Every token that ends a completion."""
    shape: JsonObject
    """Settings that determine the shapes of weights, and which are trained. A run resumes only if they are equal."""


def read_model_files(
    model: ModelConfig, world: World, policy: PolicyConfig | None = None, key: str = "model.name"
) -> ModelFiles:
    """Read the files. If the model's name is no folder, one rank per node downloads the model first. Collective.

    policy: settings of a policy that is trained. key: the setting that names the model.
    """
    folder = fetch_model(model, world, key)
    hf_config = read_model_config(model, folder)
    tokenizer = load_tokenizer(model, folder)
    return ModelFiles(
        folder=folder,
        hf_config=hf_config,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids(tokenizer, folder),
        shape=shape_of(config_json_in(folder)) | ({} if policy is None else trained_shape(policy)),
    )


def load_tokenizer(model: ModelConfig, folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `folder`, with the configured chat template if set. Raises ConfigError if unusable."""
    try:
        source = folder if model.tokenizer is None else fetch_tokenizer(ModelConfig(name=model.tokenizer))
        loaded = AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code)
        tokenizer = cast(PreTrainedTokenizerBase, loaded)  # a model's own code may return another class
        if type(tokenizer).__name__ == "MistralCommonBackend":
            tokenizer = _without_mistral_common(model, source)
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers (5.19) makes of a folder without files
            raise FileNotFoundError(f"no tokenizer files in {source}")
        if (template := model.chat_template) is not None:
            tokenizer.chat_template = template if is_inline(template) else Path(template).read_text(encoding="utf-8")
        elif tokenizer.chat_template is None and (folder / PROCESSOR_TEMPLATE).is_file():
            entries = json.loads((folder / PROCESSOR_TEMPLATE).read_text(encoding="utf-8"))
            tokenizer.chat_template = entries.get("chat_template")
    except ConfigError:
        raise
    except Exception as error:  # damaged files raise many kinds of errors
        fix = "copy the tokenizer's files there, or set model.tokenizer"
        raise ConfigError(f"model.name={model.name!r}: no usable tokenizer; {fix}: {in_one_line(error)}") from error
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        whose = "model.chat_template" if model.chat_template else f"model.name={model.name!r}: its chat template"
        raise ConfigError(f"{whose}: line {error.lineno} is not valid Jinja: {error.message}") from None
    except Exception:  # there is no template, or it rejects this conversation
        return tokenizer
    return tokenizer


def _without_mistral_common(model: ModelConfig, folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of tokenizer.json. Raises ConfigError without that file.

    If a folder has Mistral's tekken.json and mistral-common is installed, transformers (5.19) loads a tokenizer without
    a chat template, and prompts would become plain text. vLLM requires mistral-common.
    """
    if not (folder / "tokenizer.json").is_file():
        problem = "its only tokenizer is Mistral's tekken.json, which has no chat template"
        advice = "add the tokenizer.json and chat template of another release of the model"
        raise ConfigError(f"model.name={model.name!r}: {problem}; {advice}")
    return PreTrainedTokenizerFast.from_pretrained(folder)


def read_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer alone: no weights are downloaded. Raises ConfigError if the tokenizer cannot be read."""
    return load_tokenizer(model, fetch_tokenizer(model))


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[int, ...]:
    """Return the end tokens of tokenizer and generation settings, ascending. Raises ConfigError for unknown tokens."""
    setting = f"model.name={str(folder)!r}"
    vocabulary = text_part(config_json_in(folder)).get("vocab_size") or len(tokenizer)
    ids = {tokenizer.eos_token_id}
    settings = folder / "generation_config.json"
    if settings.exists():
        try:
            eos = json.loads(settings.read_text(encoding="utf-8")).get("eos_token_id")
            ids |= set(eos) if isinstance(eos, list) else {eos}
        except (ValueError, RecursionError, AttributeError, TypeError) as error:
            raise ConfigError(f"{setting}: cannot read {settings.name}: {in_one_line(error)}") from None
    for one in ids - {None}:
        if not isinstance(one, int) or not 0 <= one < vocabulary:
            found = f"eos_token_id={one!r:.60} (tokenizer or {settings.name})"
            raise ConfigError(f"{setting}: {found} is not one of the model's {vocabulary} tokens")
    return tuple(sorted(ids - {None}))
