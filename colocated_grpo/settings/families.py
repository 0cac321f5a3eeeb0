"""The model families that the tests train, and the facts about each that docs/models.md shows. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OLDEST_VLLM = "0.26"
"""First release of vLLM that the trainer supports."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts about a family: each is compared with what the tests see."""

    name: str
    architecture: str
    """Name in `tools.make_model.ARCHITECTURES`."""
    model_type: str
    """transformers' name, in config.json."""
    path: Literal["views", "load_weights"]
    """How weights reach a colocated engine on one GPU: planned copies, or vLLM's loader."""
    heads: tuple[int, ...]
    """Head sizes of released models."""
    windows: bool = False
    """True if some layers of released models attend within a sliding window."""
    experts: bool = False
    scores: Literal["plain", "sinks", "capped"] = "plain"
    """How attention differs from a softmax of the scores."""
    latent: bool = False
    """True if keys and values are computed from one vector for each token."""
    states: bool = False
    """True if some layers are linear attention."""
    transformers: str = "5.0"
    """First release of transformers that has it; the trainer needs 5.0."""
    vllm: str = OLDEST_VLLM
    """First release of vLLM that has it as a text model."""


FAMILIES = (
    Family(name="Llama", architecture="llama", model_type="llama", path="views", heads=(64, 128)),
    Family(name="Qwen 2, 2.5", architecture="qwen2", model_type="qwen2", path="views", heads=(64, 128)),
    Family(name="Qwen 3", architecture="qwen3", model_type="qwen3", path="views", heads=(128,)),
    Family(name="Mistral", architecture="mistral", model_type="mistral", path="views", heads=(128,)),
    Family(name="Ministral 3", architecture="ministral3", model_type="ministral3", path="views", heads=(128,)),
    Family(name="Gemma", architecture="gemma", model_type="gemma", path="views", heads=(256,)),
    Family(
        name="Gemma 2",
        architecture="gemma2",
        model_type="gemma2",
        path="views",
        heads=(128, 256),
        windows=True,
        scores="capped",
    ),
    Family(
        name="Gemma 3, text",
        architecture="gemma3",
        model_type="gemma3_text",
        path="views",
        heads=(256,),
        windows=True,
    ),
    Family(
        name="Gemma 4, text",
        architecture="gemma4",
        model_type="gemma4_text",
        path="load_weights",
        heads=(256, 512),
        windows=True,
        transformers="5.5",
    ),
    Family(name="GLM-4", architecture="glm4", model_type="glm4", path="views", heads=(128,)),
    Family(name="Granite", architecture="granite", model_type="granite", path="views", heads=(64, 128)),
    Family(name="OLMo 3", architecture="olmo3", model_type="olmo3", path="views", heads=(128,), windows=True),
    Family(name="Phi-3, Phi-4", architecture="phi3", model_type="phi3", path="views", heads=(96, 128)),
    Family(name="SmolLM3", architecture="smollm3", model_type="smollm3", path="views", heads=(128,)),
    Family(
        name="Qwen 3 MoE",
        architecture="qwen3_moe",
        model_type="qwen3_moe",
        path="load_weights",
        heads=(128,),
        experts=True,
    ),
    Family(
        name="Qwen3-Next",
        architecture="qwen3_next",
        model_type="qwen3_next",
        path="load_weights",
        heads=(256,),
        experts=True,
        states=True,
        transformers="5.16",
    ),
    Family(
        name="Qwen 3.5",
        architecture="qwen3_5",
        model_type="qwen3_5_text",
        path="load_weights",
        heads=(256,),
        states=True,
        transformers="5.16",
        vllm="0.32",
    ),
    Family(
        name="Qwen 3.5 MoE",
        architecture="qwen3_5_moe",
        model_type="qwen3_5_moe_text",
        path="load_weights",
        heads=(256,),
        experts=True,
        states=True,
        transformers="5.16",
        vllm="0.32",
    ),
    Family(
        name="Qwen 1.5 and 2 MoE",
        architecture="qwen2_moe",
        model_type="qwen2_moe",
        path="load_weights",
        heads=(128,),
        experts=True,
    ),
    Family(name="OLMoE", architecture="olmoe", model_type="olmoe", path="load_weights", heads=(128,), experts=True),
    Family(
        name="Mixtral", architecture="mixtral", model_type="mixtral", path="load_weights", heads=(128,), experts=True
    ),
    Family(
        name="gpt-oss",
        architecture="gpt_oss",
        model_type="gpt_oss",
        path="load_weights",
        heads=(64,),
        windows=True,
        experts=True,
        scores="sinks",
    ),
    Family(
        name="GLM-4.5 MoE",
        architecture="glm4_moe",
        model_type="glm4_moe",
        path="load_weights",
        heads=(128,),
        experts=True,
    ),
    Family(
        name="DeepSeek-V3",
        architecture="deepseek_v3",
        model_type="deepseek_v3",
        path="load_weights",
        heads=(128, 192),
        experts=True,
        latent=True,
    ),
    Family(name="GPT-2", architecture="gpt2", model_type="gpt2", path="load_weights", heads=(64,)),
)


def family_of(model_type: object) -> Family | None:
    """Return the tested family of a model type; None if there is none."""
    return next((family for family in FAMILIES if family.model_type == model_type), None)
