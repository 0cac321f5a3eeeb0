"""Model sizes by name. Imports no library, so that command lines can list them without a delay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a decoder, named as in the Llama family. gpt2 ignores kv_heads and head_dim."""

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


SMALL = Shape()
TINY = Shape(hidden=64, layers=2, intermediate=128)

_QWEN3 = {"kv_heads": 8, "head_dim": 128, "vocab": 151936, "max_positions": 40960}
SHAPES = {
    "tiny": TINY,
    "small": SMALL,
    "qwen3-0.6b": Shape(hidden=1024, layers=28, heads=16, intermediate=3072, **_QWEN3),
    "qwen3-1.7b": Shape(hidden=2048, layers=28, heads=16, intermediate=6144, **_QWEN3),
    "qwen3-4b": Shape(hidden=2560, layers=36, heads=32, intermediate=9728, **_QWEN3),
    "qwen3-8b": Shape(hidden=4096, layers=36, heads=32, intermediate=12288, tied=False, **_QWEN3),
}
