"""Model families and sizes by name. Imports no library, so that command lines can list them without a delay."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from colocated_grpo.settings.families import FAMILIES

ARCHITECTURES = {family.architecture: family.model_type for family in FAMILIES}
"""Name of a model family -> transformers' model_type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Family and sizes of a decoder, named as in the Llama family. gpt2 ignores kv_heads and head_dim."""

    architecture: str = "qwen3"
    """A key of `ARCHITECTURES`."""
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 512
    vocab: int | None = None
    """None: the tokenizer's alphabet. A larger number adds unused tokens to the tokenizer."""
    tied: bool = True
    """True if the output head is the embedding matrix."""
    max_positions: int = 2048
    settings: Mapping[str, object] = field(default_factory=dict)
    """Further entries of config.json, such as the numbers of experts. They override entries derived from the sizes."""


SMALL = Shape()
TINY = Shape(hidden=64, layers=2, intermediate=128)

_QWEN3 = {"kv_heads": 8, "head_dim": 128, "vocab": 151936, "max_positions": 40960}
_QWEN3_8B = Shape(hidden=4096, layers=36, heads=32, intermediate=12288, tied=False, **_QWEN3)
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_QWEN3_30B = replace(
    _QWEN3_8B, architecture="qwen3_moe", hidden=2048, layers=48, kv_heads=4, intermediate=6144, settings=_EXPERTS
)
_QWEN3_5 = {"kv_heads": 4, "head_dim": 256, "vocab": 248320, "max_positions": 262144}
_LINEAR = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_QWEN3_5_4B = Shape(
    architecture="qwen3_5", hidden=2560, layers=32, heads=16, intermediate=9216, settings=_LINEAR, **_QWEN3_5
)
_OLMOE_EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8}
_OLMOE = {"head_dim": 128, "vocab": 50304, "max_positions": 4096, "settings": _OLMOE_EXPERTS}
_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192}
_LLAMA3_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 = {"kv_heads": 8, "head_dim": 128, "vocab": 128256, "max_positions": 131072}
_LLAMA3_8B = Shape(architecture="llama", hidden=4096, layers=32, heads=32, intermediate=14336, tied=False, **_LLAMA3)
SHAPES = {
    "tiny": TINY,
    "small": SMALL,
    "qwen3-0.6b": Shape(hidden=1024, layers=28, heads=16, intermediate=3072, **_QWEN3),
    "qwen3-1.7b": Shape(hidden=2048, layers=28, heads=16, intermediate=6144, **_QWEN3),
    "qwen3-4b": Shape(hidden=2560, layers=36, heads=32, intermediate=9728, **_QWEN3),
    "qwen3-8b": _QWEN3_8B,
    "qwen3-30b-a3b": _QWEN3_30B,
    "qwen3-15b-a2b": replace(_QWEN3_30B, layers=24),  # half of the blocks
    "llama-3.1-8b": replace(_LLAMA3_8B, settings={"rope_parameters": _LLAMA3_ROPE}),
    "olmoe-7b-a1b": Shape(
        architecture="olmoe", hidden=2048, layers=16, heads=16, kv_heads=16, intermediate=1024, tied=False, **_OLMOE
    ),
    "qwen3.5-4b": _QWEN3_5_4B,
    "qwen3.5-9b": replace(_QWEN3_5_4B, hidden=4096, intermediate=12288, tied=False),
}
