"""Single turns of town with a teacher's reply: for the warm start of a model that does not know the form yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from colocated_grpo.environments.base import Split
from colocated_grpo.environments.town.from_config import open_town

SPLITS = {"train": 0, "held_out": 1}


class TownLessons:
    """Arguments: those of the turn environment 'town'. The games are played by the teacher, 'answer' is its reply."""

    def __init__(self, **args: Any) -> None:
        self._args = args
        self._judge = open_town(seed=0, **args)

    def prompts(self, seed: int, split: Split) -> Iterator[dict[str, Any]]:
        town = open_town(seed=2 * seed + SPLITS[split], **self._args)
        while True:
            for turn in town.next_batch():
                yield {"prompt": turn.messages, "answer": town.advice(turn), "turn": turn}
                town.play_on(turn)

    def score(self, item: dict[str, Any], completion: str) -> dict[str, float]:
        """1 for a legal reply, else 0: what a good move is worth, the games themselves teach."""
        [outcome] = self._judge.score(item["turn"], [completion])
        return {"reward": outcome.parts["legal_rate"], "parse_rate": outcome.parts["parse_rate"]}
