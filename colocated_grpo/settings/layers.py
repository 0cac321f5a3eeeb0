"""Indices of transformer blocks as settings: `20-31`, `0-3,28-31`, `5` or a list of numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


def parse_layers(value: Any) -> Any:
    """Return the ascending indices that a text or number names; other values unchanged, for pydantic to check."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return sorted(set(value))
    if not isinstance(value, str):
        return value
    indices: set[int] = set()
    for part in value.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{part.strip()!r} is no range of blocks; write 20-31 or 0-3,28-31")
        indices |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(indices)


def layers_text(indices: Sequence[int]) -> str:
    """Return ascending indices as text that `parse_layers` reads: 0-3,28-31."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def out_of_range(indices: Sequence[int], blocks: int) -> str | None:
    """Return the rule that the indices violate in a model of `blocks` blocks; None if all exist."""
    wrong = [index for index in indices if index >= blocks]
    return f"the model's blocks are 0-{blocks - 1}, so there is no block {wrong[0]}" if wrong else None


Layers = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(parse_layers), Field(min_length=1)]
"""Indices of transformer blocks, from 0."""
