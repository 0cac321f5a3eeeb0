"""vLLM's engine arguments, and the model class, settings and tensors that it uses.

config.json lacks entries that vLLM needs. Of a vision-language model, vLLM would build all parts. The text part has its
own settings, and its tensors are a part of the whole model's checkpoint.
"""

import copy
import dataclasses
import math
import sys
from collections.abc import Generator, Mapping
from difflib import get_close_matches
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import vllm
from pydantic import ConfigDict, ValidationError, create_model
from torch import Tensor, nn
from transformers import PretrainedConfig
from vllm import LLM, ModelRegistry
from vllm.config.load import LoadConfig
from vllm.config.model import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from colocated_grpo.errors import ConfigError
from colocated_grpo.rollout.vllm.kv_budget import kv_cache_arguments
from colocated_grpo.rollout.vllm.routes import RECORD_ROUTES
from colocated_grpo.rollout.vllm.spec import EngineSpec
from colocated_grpo.runtime.distributed import World, derive_seed
from colocated_grpo.runtime.text_part import read_text_config
from colocated_grpo.settings.config_json import MODULES, config_json_in, has_text_part, text_name, text_part
from colocated_grpo.settings.errors import error_lines
from colocated_grpo.settings.model_support import has_latent_attention, has_linear_attention
from colocated_grpo.types import JsonObject

CUDA_COMPILATION = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Full decode graphs without inductor: starts in 14 s instead of 43 s, and decodes within 3 % of inductor's speed."""
SIGMOID_ROUTER: JsonObject = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""The only router that transformers has for DeepSeek-V3. vLLM's default is the softmax of DeepSeek-V2."""
LOAD_FORMAT = "text_part"
DEFINED_IN = dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), "vllm.model_executor.models.qwen3_5")
"""Text models in vLLM modules that also define vision-language models, whose processors need torchvision."""
PROCESSORS = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
PROCESSORS_FOR_PILLOW = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
"""A module with the same names that needs no torchvision. transformers falls back to it for a model given by name."""


def engine_arguments(spec: EngineSpec, world: World) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`. Call after the trainer's resident state is allocated."""
    on_gpu = world.device.type == "cuda"
    config_json = config_json_in(spec.folder)
    arguments: dict[str, Any] = {
        "model": str(spec.folder),
        "trust_remote_code": spec.trust_remote_code,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": spec.tensor_parallel_size,
        "load_format": "auto" if spec.reads_weights else "dummy",
        "dtype": str(spec.dtype).removeprefix("torch."),
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "seed": derive_seed(spec.seed, "engine", world.rank // spec.tensor_parallel_size),
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "skip_tokenizer_init": not spec.needs_tokenizer,
        "enforce_eager": spec.enforce_eager or not on_gpu,
        "hf_overrides": overrides(config_json),
    }
    if has_linear_attention(config_json):
        # Cached prefixes would need the state after each block. vLLM's support is experimental, and absent on CPUs.
        arguments["enable_prefix_caching"] = False
    if on_gpu:
        arguments["enable_sleep_mode"] = spec.sleep
        if not spec.enforce_eager:
            arguments["compilation_config"] = CUDA_COMPILATION
    else:
        # With chunked prefill vLLM rewinds the generator of a seeded request, which CPU generators do not support.
        arguments["enable_chunked_prefill"] = False
        if has_latent_attention(config_json):
            # The default backend on processors with AMX computes in bfloat16 only, and keeps no weights to reload.
            arguments["attention_backend"] = "CPU_MLA"
    arguments |= {**kv_cache_arguments(spec, world.device), **spec.args}
    if has_text_part(config_json):  # vLLM then builds and reads only the text part
        text = read_text_config(spec.folder, trust_remote_code=spec.trust_remote_code)
        arguments["hf_overrides"] = partial(_text_alone, text, arguments["hf_overrides"])
        if arguments["load_format"] != "dummy":
            arguments["load_format"] = LOAD_FORMAT
    if spec.records_routes:
        arguments["additional_config"] = {**arguments.get("additional_config", {}), RECORD_ROUTES: True}
    return arguments


def check_arguments(args: Mapping[str, object]) -> None:
    """Raise ConfigError if vLLM has no argument of a name in `engine.args`, or if a value is not of its type."""
    types = {field.name: field.type for field in dataclasses.fields(EngineArgs)}
    known = types.keys() | signature(LLM.__init__).parameters.keys()
    for name in args:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"engine.args.{name}: not an engine argument of vLLM {vllm.__version__}{hint}")
    # None is vLLM's default for every argument. A type in quotes needs names that vLLM imports for type checkers only.
    fields: dict[str, Any] = {name: (kind, None) for name, kind in types.items() if not isinstance(kind, str)}
    given = {name: value for name, value in args.items() if name in fields and value is not None}
    rules = ConfigDict(strict=True, arbitrary_types_allowed=True, protected_namespaces=())
    model = create_model("EngineArguments", __config__=rules, **{name: fields[name] for name in given})
    try:
        model(**given)
    except ValidationError as error:
        # Other errors are of classes, which vLLM makes from a name or from a mapping.
        wrong = [
            one for one in error.errors() if one["type"] in ("literal_error", "bool_type", "int_type", "float_type")
        ]
        if wrong:
            raise ConfigError(f"engine.args.{error_lines(wrong, given, {}, model, {})[0]}") from None


def overrides(config_json: JsonObject) -> JsonObject:
    """Return vLLM's `hf_overrides`: entries that transformers writes under other names or not at all."""
    if has_latent_attention(config_json):
        return SIGMOID_ROUTER
    rope = text_part(config_json).get("rope_parameters") or {}
    return _query_scale(rope) | _yarn_scale(rope)


def _query_scale(rope: JsonObject) -> JsonObject:
    """Return the entry that scales queries by their position, as in Ministral 3."""
    if rope.get("llama_4_scaling_beta") is None:
        return {}
    key = "original_max_position_embeddings"
    return {"llama_4_scaling": {"beta": rope["llama_4_scaling_beta"], key: rope[key]}}


def _yarn_scale(rope: JsonObject) -> JsonObject:
    """Return rope parameters with an explicit YaRN scale, also under vLLM 0.26's names; {} if the default applies."""
    if rope.get("rope_type") != "yarn":
        return {}
    if (scale := rope.get("attention_factor")) is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        scale = _mscale(rope, rope["mscale"]) / _mscale(rope, rope["mscale_all_dim"])
    if scale is None:
        return {}
    names = {"attention_factor": scale, "attn_factor": scale, "apply_yarn_scaling": False}
    return {"rope_parameters": rope | names}


def _mscale(rope: JsonObject, mscale: float) -> float:
    """Return the scale of the YaRN paper, 0.1 ln(factor) + 1, with `mscale` times the logarithm."""
    return 0.1 * mscale * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0


@register_model_loader(LOAD_FORMAT)
class TextPartLoader(DefaultModelLoader):
    """Reads the tensors of the text part under the names of a text-only checkpoint."""

    def __init__(self, load_config: LoadConfig) -> None:
        # "auto" would prefer the files of Mistral's own format, if the folder has them too.
        super().__init__(dataclasses.replace(load_config, load_format="hf"))

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Generator[tuple[str, Tensor], None, None]:
        for name, tensor in super().get_all_weights(model_config, model):
            if (own := text_name(name)) is not None:
                yield own, tensor


def register_class(folder: Path, config_json: JsonObject) -> None:
    """Register vLLM's class of this text model, stored alone or inside a vision-language model.

    Raises ConfigError if vLLM has no such class.

    vLLM 0.32 has a class for the text model of Qwen 3.5. vLLM 0.26 has none, and would build the whole model.
    """
    kind = (config_json.get("text_config") or config_json).get("model_type")
    module = next((module for (_, text_type), module in MODULES.items() if text_type == kind), None)
    if module is None:
        return
    if module not in ModelRegistry.get_supported_archs():
        problem = f"vLLM {vllm.__version__} has no {module}; install a later version of vLLM"
        raise ConfigError(f"model.name={str(folder)!r}: {problem}")
    _register_without_torchvision(module)


@cache  # each engine of a process calls it, and vLLM warns of a second registration
def _register_without_torchvision(architecture: str) -> None:
    """Import and register a class of `DEFINED_IN`. Does nothing for other classes, or if torchvision is installed.

    The CPU installation has no torchvision, and text models do not need it.
    """
    if architecture not in DEFINED_IN or find_spec("torchvision") is not None:
        return
    sys.modules.setdefault(PROCESSORS, import_module(PROCESSORS_FOR_PILLOW))
    # Pass the class itself. If given "module:class", vLLM imports the module in another process, which lacks the
    # replacement of `PROCESSORS` above, so the import fails.
    ModelRegistry.register_model(architecture, getattr(import_module(DEFINED_IN[architecture]), architecture))


def _text_alone(text: PretrainedConfig, entries: JsonObject, config: PretrainedConfig) -> PretrainedConfig:
    """Return the text part's settings, with `entries`, in place of the settings of the whole model.

    config: settings of the whole model, or a dummy that vLLM passes to detect a change of the model type.
    """
    if config.get_text_config() is config:
        return config
    text = copy.deepcopy(text)
    text.update(entries)
    return text
