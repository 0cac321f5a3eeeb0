"""What environments have in common that are seeded by a number: items that do not hang on those before them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

from colocated_grpo.config.base import Section
from colocated_grpo.environments.base import Split


class SeededEpisode(Section):
    """Making an item may cost a game or a request to a server, so a resume must not have to make those of before."""

    def prompts(self, seed: int, split: Split) -> Iterator[dict[str, Any]]:
        return self.prompts_from(seed, split, 0)

    def prompts_from(self, seed: int, split: Split, start: int) -> Iterator[dict[str, Any]]:
        return (self._item(Random(f"{seed}/{split}/{number}"), split) for number in count(start))

    def _item(self, chance: Random, split: Split) -> dict[str, Any]:
        raise NotImplementedError


def draw_seed(chance: Random, split: Split) -> int:
    """Odd ones are held out, so that no run trains on what another holds out."""
    return 2 * chance.randrange(2**30) + (split == "held_out")
