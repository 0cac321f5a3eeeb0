"""Sizes of the models that are made here. Imports nothing: who only lists them need not wait for a library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a decoder, in the words of the llama family; gpt2 has no kv_heads and no head_dim of its own."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 512
    vocab: int | None = None
    """None: exactly the tokenizer's alphabet. Larger: the tokenizer is filled up to it."""
    tied: bool = True
    """The output head is the embedding matrix."""
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
