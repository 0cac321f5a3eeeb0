"""Decides from config.json alone if a model is supported. Imports no torch, so that the launcher can check first.

A rule rejects a feature that packed training would compute wrongly, or that would fail only after the weights are
downloaded. Rules test features; model types are listed only where config.json does not show the feature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from colocated_grpo.errors import ConfigError
from colocated_grpo.settings.config_json import OTHER_PARTS, attention_heads, has_text_part, left_out, text_part
from colocated_grpo.settings.families import FAMILIES, family_of
from colocated_grpo.types import JsonObject

STATEFUL_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mamba2", "recurrent"}
"""transformers' names of layers with a recurrent state, with or without attention."""
DELTA_RULE_TYPES = {family.model_type for family in FAMILIES if family.states}
"""Model types with a recurrent state that `policy.linear_attention` supports."""


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


STATEFUL_TYPES = _types(
    "bamba deepseek_v4 falcon_h1 falcon_mamba granitemoehybrid inkling_text jamba kimi_linear lfm2 lfm2_moe mamba "
    "mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen4_exp qwen4_exp_text recurrent_gemma rwkv xlstm "
    "zamba zamba2 zaya"
)
OWN_ATTENTION_TYPES = _types(
    "bloom codegen cpmant falcon gpt_neo gpt_neox_japanese gptj mpt openai-gpt reformer xglm xlm xlnet"
)
"""Models that do not call transformers' attention interface, where packed attention is registered."""
UNPASSED_TYPES = _types("moshi nemotron stablelm")
"""Models that call transformers' attention interface without the boundaries of packed sequences."""
OUTPUT_BIAS_TYPES = _types("ctrl modernbert-decoder phi")
ENCODER_TYPES = _types(
    "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text electra "
    "ernie git marian mbart megatron-bert mvp pegasus plbart prophetnet rembert roberta roberta-prelayernorm roc_bert "
    "roformer trocr whisper xlm-roberta xlm-roberta-xl xmod"
)
SINK_TYPES = _types("gpt_oss granite_swa")
"""Models with attention sinks. config.json does not show the sinks."""
EXPERT_TYPES = _types("dbrx dots1")
TRAINED_EXPERT_TYPES = {family.model_type for family in FAMILIES if family.experts}
"""Mixtures of experts whose checkpoints `policy.checkpoint_files` reads and writes."""
LATENT_TYPES = {family.model_type for family in FAMILIES if family.latent}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
COMPOSITE = ("text_config", *OTHER_PARTS)
COMPOSITE_TYPES = _types("blt fuyu got_ocr2 gemma4_assistant gemma4_unified_assistant")
RENAMED_TYPES = _types("gpt_neox hrm_text")

_KV_HEADS = ("num_key_value_heads", "num_global_key_value_heads")
CPU_ENGINE_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_ENGINE_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""Sizes of latent attention that vLLM's CPU kernel supports: the sizes of released models."""
CPU_ENGINE_STATE_SIZES = (64, 128)
"""Head sizes of linear attention covered by the tests of the CPU engine."""

Settings = JsonObject


@dataclass(frozen=True, kw_only=True)
class Rule:
    feature: str
    """Name of the feature. Includes the reason if the name alone does not show it."""
    examples: str
    found: Callable[[Settings, Settings], object]
    """(config.json, its text part) -> true if the model has the feature."""


RULES = (
    Rule(
        feature="parts beside the language model, such as a vision tower, and no row in the table of text parts",
        examples="Qwen2.5-VL, LLaVA, PaliGemma, Gemma 3n",
        found=lambda whole, text: (
            not has_text_part(whole)
            and (any(whole.get(key) for key in COMPOSITE) or whole.get("model_type") in COMPOSITE_TYPES)
        ),
    ),
    Rule(
        feature="a mixture of experts of another kind than in the tested families",
        examples="DeepSeek-V2, Granite MoE, Llama 4",
        found=lambda whole, text: _experts(text) > 1 and text.get("model_type") not in TRAINED_EXPERT_TYPES,
    ),
    Rule(
        # The state would leak from one packed sequence into the next, and would be missing after a shared prefix.
        feature="layers that carry a state from token to token, other than the gated delta rule of Qwen",
        examples="LFM2, Mamba, Jamba, MiniMax",
        found=lambda whole, text: (
            (STATEFUL_LAYERS & _layer_types(text) or text.get("model_type") in STATEFUL_TYPES)
            and text.get("model_type") not in DELTA_RULE_TYPES
        ),
    ),
    Rule(
        feature="attention within chunks",
        examples="Llama 4",
        found=lambda whole, text: "chunked_attention" in _layer_types(text) or text.get("attention_chunk_size"),
    ),
    Rule(
        feature="latent attention other than in DeepSeek-V3",
        examples="DeepSeek-V2, DeepSeek-V3.2, MiniCPM3",
        found=lambda whole, text: text.get("kv_lora_rank") and text.get("model_type") not in LATENT_TYPES,
    ),
    Rule(
        feature="attention to later tokens",
        examples="embedding models",
        found=lambda whole, text: text.get("use_bidirectional_attention") in (True, "all"),
    ),
    Rule(
        feature="attention outside transformers' interface: packed sequences would see each other",
        examples="BLOOM, Falcon, GPT-J, MPT, Nemotron, StableLM",
        found=lambda whole, text: text.get("model_type") in OWN_ATTENTION_TYPES | UNPASSED_TYPES,
    ),
    Rule(
        feature="an output layer with a bias",
        examples="Phi-1, Phi-2",
        found=lambda whole, text: text.get("model_type") in OUTPUT_BIAS_TYPES,
    ),
    Rule(
        feature="logits that are both scaled and soft-capped",
        examples="none is known",
        found=lambda whole, text: (
            text.get("final_logit_softcapping")
            and any(text.get(key) not in (None, 1) for key in ("logits_scaling", "logit_scale"))
        ),
    ),
    Rule(
        feature="checkpoints whose tensors have other names than in transformers' module",
        examples="GPT-NeoX (Pythia)",
        found=lambda whole, text: text.get("model_type") in RENAMED_TYPES,
    ),
    Rule(
        feature="an encoder",
        examples="BERT, BART",
        found=lambda whole, text: whole.get("is_encoder_decoder") or text.get("model_type") in ENCODER_TYPES,
    ),
    Rule(
        feature="quantized weights; train the checkpoint that they were made from",
        examples="fp8, AWQ and GPTQ checkpoints; gpt-oss in MXFP4",
        found=lambda whole, text: whole.get("quantization_config") or text.get("quantization_config"),
    ),
)
"""Rules for unsupported features. Each rule has a row in docs/models.md."""


def refusals(config_json: Settings) -> list[str]:
    """Return the unsupported features of the model; empty if it can be trained."""
    text = text_part(config_json)
    return [rule.feature for rule in RULES if rule.found(config_json, text)]


def check_trains(config_json: Settings, setting: str) -> None:
    """Raise ConfigError with one line if the model is unsupported. setting: key and value that name the model."""
    if features := refusals(config_json):
        what = f"model type {config_json.get('model_type')!r} does not train because it has {'; and '.join(features)}"
        raise ConfigError(f"{setting}: {what} (docs/models.md lists what trains)")


def check_has_experts(config_json: Settings, setting: str) -> None:
    if _experts(text_part(config_json)) < 2:
        raise ConfigError(f"{setting}: needs a mixture of experts, not model type {config_json.get('model_type')!r}")


def verdict(config_json: Settings) -> str:
    kind = text_part(config_json).get("model_type", "unknown type")
    if (family := family_of(kind)) is None:
        return f"{kind} is not among the tested families{left_out(config_json)}"
    return f"trains ({family.name}{left_out(config_json)})"


def check_cpu_engine(config_json: Settings, setting: str, *, bfloat16: bool, adapters: bool = False) -> None:
    """Raise ConfigError with one line if vLLM's engine for CPUs cannot compute the model.

    bfloat16: True if policy and engine compute in bfloat16. adapters: True if the engine loads them beside the model.
    """
    if adapters and _experts(text_part(config_json)) > 1:
        advice = "use the merged model (checkpoint.export_merged: true), or a GPU"
        raise ConfigError(f"{setting}: vLLM's engine for CPUs loads no adapter beside a mixture of experts; {advice}")
    text = text_part(config_json)
    checked: list[tuple[str, object, Sequence[int]]] = []
    if has_linear_attention(config_json):
        if not bfloat16:
            rule = "vLLM's engine for CPUs has linear attention in bfloat16 only; set policy.compute_dtype: bfloat16"
            raise ConfigError(f"{setting}: {rule}")
        sizes = ("linear_key_head_dim", "linear_value_head_dim")
        checked += [(f"{key}={text.get(key)}", text.get(key), CPU_ENGINE_STATE_SIZES) for key in sizes]
    if has_latent_attention(config_json):
        checked += [(f"{key}={text.get(key)}", text.get(key), [size]) for key, size in CPU_ENGINE_LATENT.items()]
    else:
        checked += [(f"heads of {size}", size, CPU_ENGINE_HEAD_SIZES) for size in sorted(head_sizes(config_json))]
    for shown, size, supported in checked:
        if size not in supported:
            known = ", ".join(map(str, supported))
            raise ConfigError(f"{setting}: {shown}, but vLLM's engine for CPUs supports {known}; train on a GPU")


def check_context(model: Settings, size: int) -> None:
    """Raise ConfigError with one line if the model's sequences cannot be split over `size` ranks."""
    if size == 1:
        return
    setting, text = f"policy.context_parallel={size}", text_part(model)
    if has_linear_attention(model):
        rule = "not supported with linear attention, whose recurrent state runs through the whole sequence; set it to 1"
        raise ConfigError(f"{setting}: {rule}")
    heads = attention_heads(text) or 0
    kv_heads = [count for key in _KV_HEADS if (count := text.get(key))]
    fits = lambda ranks: heads % ranks == 0 and all(not kv % ranks or not ranks % kv for kv in kv_heads)  # noqa: E731
    if not fits(size):
        known = ", ".join(map(str, (heads, *kv_heads)))
        usable = ", ".join(str(ranks) for ranks in range(1, heads + 1) if fits(ranks))
        raise ConfigError(f"{setting}: does not divide the model's heads ({known}) evenly; use one of {usable}")


def has_linear_attention(config_json: Settings) -> bool:
    """Return True if some layers carry a recurrent state instead of keys and values."""
    text = text_part(config_json)
    # The config.json of the released Qwen3-Next has an interval instead of layer types.
    return "linear_attention" in _layer_types(text) or text.get("model_type") in DELTA_RULE_TYPES


def has_latent_attention(config_json: Settings) -> bool:
    """Return True if keys and values of all heads are computed from one latent vector. The engine caches it."""
    return bool(text_part(config_json).get("kv_lora_rank"))


def head_sizes(config_json: Settings) -> set[int]:
    """Return the sizes of the attention heads of all layers; empty if config.json does not state them."""
    text = text_part(config_json)
    if has_latent_attention(config_json):  # queries and keys have one size, values another
        return {text["qk_nope_head_dim"] + text["qk_rope_head_dim"], text["v_head_dim"]}
    heads, width = attention_heads(text), text.get("hidden_size") or text.get("n_embd")
    size = text.get("head_dim") or (heads and width and width // heads)
    if not size:
        return set()
    per_layer = text.get("per_layer_config") or {}
    others = {layer["head_dim"] for layer in per_layer.values() if layer.get("head_dim")}
    if text.get("model_type") in _GLOBAL_HEAD_TYPES and not per_layer:
        others = {text.get("global_head_dim") or _GLOBAL_HEAD_DIM}
    return {size} | others


_GLOBAL_HEAD_TYPES, _GLOBAL_HEAD_DIM = {"gemma4_text", "gemma4_unified_text"}, 512
"""Model types with another head size in layers without a window, and that size: transformers' default, used if
config.json omits the size."""


def has_plain_scores(text: Settings) -> bool:
    """Return False if attention has sinks (extra scores without values), or scores bounded by a soft cap."""
    return text.get("model_type") not in SINK_TYPES and not text.get("attn_logit_softcapping")


def _layer_types(text: Settings) -> set[str]:
    return set(text.get("layer_types") or text.get("layers_block_type") or ())


def _experts(text: Settings) -> int:
    if text.get("enable_moe_block") is False:
        return 0
    named = "moe" in str(text.get("model_type")) or text.get("model_type") in EXPERT_TYPES
    stated = [count for key in EXPERT_COUNTS if isinstance(count := text.get(key), int | list)]
    # Some families state one count for each layer.
    return max([2 if named else 0, *(max(count, default=0) if isinstance(count, list) else count for count in stated)])
