"""Models with random weights in the families that train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from colocated_grpo.tools.make_model import build_char_tokenizer, build_model, save_model
from colocated_grpo.tools.shapes import TINY, Shape


def make_model(
    out: str | Path,
    *,
    architecture: str | None = None,
    shape: Shape = TINY,
    seed: int = 0,
    init_std: float = 0.02,
    dtype: torch.dtype = torch.float32,
    settings: Mapping[str, object] | None = None,
) -> Path:
    """Write a model with random weights and its tokenizer to the new folder `out`, and return the path.

    architecture: replaces the architecture of `shape`. settings: further entries of config.json.
    """
    entries = {**shape.settings, "initializer_range": init_std, **(settings or {})}
    shape = replace(shape, architecture=architecture or shape.architecture, settings=entries)
    tokenizer = build_char_tokenizer(shape.vocab, shape.max_positions)
    model = build_model(shape, tokenizer, seed=seed, dtype=dtype)
    save_model(model, tokenizer, Path(out))
    return Path(out)
