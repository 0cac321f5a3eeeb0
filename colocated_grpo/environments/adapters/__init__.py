"""Adapters for environments of other libraries, imported if a config names them, and the base of their episodes."""

from collections.abc import Iterator
from itertools import count
from random import Random

from colocated_grpo.environments.base import Item, Split
from colocated_grpo.settings.base import Section


class SeededEpisode(Section):
    """Episode with endless items. A resumed run skips earlier ones: one may take a game or a request to a server."""

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        return self.prompts_from(seed, split, 0)

    def prompts_from(self, seed: int, split: Split, start: int) -> Iterator[Item]:
        return (self._item(Random(f"{seed}/{split}/{number}"), split) for number in count(start))

    def _item(self, rng: Random, split: Split) -> Item:
        raise NotImplementedError


def draw_seed(rng: Random, split: Split) -> int:
    """Return an even seed for training and an odd seed for held-out items, so that no run trains on held-out items."""
    return 2 * rng.randrange(2**30) + (split == "held_out")
