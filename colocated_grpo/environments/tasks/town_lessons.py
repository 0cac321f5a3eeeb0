"""Single turns of town with the scripted teacher's reply, to warm-start a model that cannot yet produce the format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from colocated_grpo.environments.base import Item, Split
from colocated_grpo.environments.town.from_config import open_town

SPLIT_SEEDS = {"train": 0, "held_out": 1}


class TownLessons:
    """Args are those of the turn environment 'town'. The teacher plays every seat; "answer" is its reply."""

    def __init__(self, **args: Any) -> None:
        self._args = args
        self._judge = open_town(seed=0, **args)

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        town = open_town(seed=2 * seed + SPLIT_SEEDS[split], **self._args)
        while True:
            for turn in town.next_batch():
                yield {"prompt": turn.messages, "answer": town.advice(turn), "turn": turn}
                town.play_on(turn)

    def score(self, item: Item, completion: str) -> dict[str, float]:
        """Return 1 for a legal reply, else 0. Move quality is not scored: whole games train it."""
        [outcome] = self._judge.score(item["turn"], [completion])
        return {"reward": outcome.parts["legal_rate"], "parse_rate": outcome.parts["parse_rate"]}
