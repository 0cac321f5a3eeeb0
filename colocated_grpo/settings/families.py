"""Model families trained by the tests, with the facts shown in docs/models.md. Imports no torch."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

OLDEST_VLLM = "0.26"
"""First release of vLLM that the trainer supports."""


@dataclass(frozen=True)
class Family:
    """Facts about a model family. The tests verify each fact."""

    name: str
    model_type: str
    """transformers' name, in config.json."""
    heads: tuple[int, ...]
    """Head sizes of released models."""
    path: Literal["views", "load_weights"] = "views"
    """Transport of weights to a colocated engine on one GPU. views: planned copies. load_weights: vLLM's loader."""
    windows: bool = False
    """True if some layers of released models attend within a sliding window."""
    experts: bool = False
    scores: Literal["plain", "sinks", "capped"] = "plain"
    """plain: attention is a softmax of the scores. sinks: with attention sinks. capped: with a soft cap."""
    latent: bool = False
    """True if the keys and values of a token are computed from one vector."""
    states: bool = False
    """True if some layers use linear attention."""
    transformers: str = "5.0"
    """First release of transformers with this family. The trainer itself needs at least 5.0."""
    vllm: str = OLDEST_VLLM
    """First release of vLLM with this family as a text model."""

    @property
    def architecture(self) -> str:
        """Name of the family in command lines and tests."""
        return self.model_type.removesuffix("_text")


_mixture = partial(Family, path="load_weights", experts=True)

FAMILIES = (
    Family("Llama", "llama", (64, 128)),
    Family("Qwen 2, 2.5", "qwen2", (64, 128)),
    Family("Qwen 3", "qwen3", (128,)),
    Family("Mistral", "mistral", (128,)),
    Family("Ministral 3", "ministral3", (128,)),
    Family("Gemma", "gemma", (256,)),
    Family("Gemma 2", "gemma2", (128, 256), windows=True, scores="capped"),
    Family("Gemma 3, text", "gemma3_text", (256,), windows=True),
    Family("Gemma 4, text", "gemma4_text", (256, 512), path="load_weights", windows=True, transformers="5.5"),
    Family("GLM-4", "glm4", (128,)),
    Family("Granite", "granite", (64, 128)),
    Family("OLMo 3", "olmo3", (128,), windows=True),
    Family("Phi-3, Phi-4", "phi3", (96, 128)),
    Family("SmolLM3", "smollm3", (128,)),
    _mixture("Qwen 3 MoE", "qwen3_moe", (128,)),
    _mixture("Qwen3-Next", "qwen3_next", (256,), states=True, transformers="5.16"),
    Family("Qwen 3.5", "qwen3_5_text", (256,), path="load_weights", states=True, transformers="5.16", vllm="0.32"),
    _mixture("Qwen 3.5 MoE", "qwen3_5_moe_text", (256,), states=True, transformers="5.16", vllm="0.32"),
    _mixture("Qwen 1.5 and 2 MoE", "qwen2_moe", (128,)),
    _mixture("OLMoE", "olmoe", (128,)),
    _mixture("Mixtral", "mixtral", (128,)),
    _mixture("gpt-oss", "gpt_oss", (64,), windows=True, scores="sinks"),
    _mixture("GLM-4.5 MoE", "glm4_moe", (128,)),
    _mixture("DeepSeek-V3", "deepseek_v3", (128, 192), latent=True),
    Family("GPT-2", "gpt2", (64,), path="load_weights"),
)


def family_of(model_type: object) -> Family | None:
    """Return the tested family of a model type; None if no tested family has this type."""
    return next((family for family in FAMILIES if family.model_type == model_type), None)
