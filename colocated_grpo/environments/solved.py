"""Skipping of prompts that the policy has solved in every completion of their last visits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from colocated_grpo.environments.base import BatchResult, Item
from colocated_grpo.environments.streams import ItemStream
from colocated_grpo.settings.generation import SkipSolvedConfig
from colocated_grpo.types import Group, JsonObject

REMEMBERED = 1 << 17
"""Prompts with a count, more than common datasets have rows. They are part of every checkpoint."""
SOLVED = "solved"


class UnsolvedItems:
    """An `ItemStream` that leaves out items whose last `after` visits were solved.

    Where all items are solved, the counts are forgotten and every item is visited again.
    """

    def __init__(self, stream: ItemStream, name: str, config: SkipSolvedConfig) -> None:
        self._stream = stream
        self._name = name
        self._config = config
        self._visits: dict[str, int] = {}
        """Solved visits in a row, at least 1, by item; least recently visited item first."""
        self._skipped = 0
        """Items left out since the last `record`."""

    @property
    def max_attempts(self) -> int:
        return self._stream.max_attempts

    def take(self) -> Item:
        for _ in range(self.max_attempts):
            item = self._stream.take()
            if self._visits.get(key_of(item), 0) < self._config.after:
                return item
            self._skipped += 1
        self._visits.clear()
        return self._stream.take()

    def reject(self, item: Item) -> None:
        self._stream.reject(item)

    def record(self, groups: Sequence[Group]) -> BatchResult:
        for group in groups:
            key = key_of(group.prompt.item)
            visits = self._visits.pop(key, 0)  # inserted again at the end: the dict is ordered by last visit
            if self._is_solved(group):
                self._visits[key] = visits + 1
        while len(self._visits) > REMEMBERED:
            del self._visits[next(iter(self._visits))]
        result = self._stream.record(groups)
        skipped, self._skipped = self._skipped, 0
        return replace(result, metrics={**result.metrics, f"prompts_skipped/{self._name}": float(skipped)})

    def _is_solved(self, group: Group) -> bool:
        rewards = {rollout.score.reward for rollout in group.rollouts}
        [reward, *others] = rewards
        return not others and reward is not None and reward >= self._config.reward

    def state_dict(self) -> JsonObject:
        return {**self._stream.state_dict(), SOLVED: {"visits": dict(self._visits), "skipped": self._skipped}}

    def load_state_dict(self, state: JsonObject) -> None:
        self._stream.load_state_dict(state)
        solved = state.get(SOLVED, {"visits": {}, "skipped": 0})  # missing in checkpoints of runs without this setting
        self._visits, self._skipped = dict(solved["visits"]), solved["skipped"]


def key_of(item: Item) -> str:
    """Return a short hash of an item. Equal prompts with other columns are different items."""

    def name_of_type(value: Any) -> str:
        return type(value).__name__  # a value that JSON lacks, such as an image

    text = json.dumps(item, sort_keys=True, default=name_of_type)
    return blake2b(text.encode(), digest_size=8).hexdigest()
