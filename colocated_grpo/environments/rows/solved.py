"""Training items without those that the policy has solved at their last visits."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from colocated_grpo.environments.base import BatchResult, Item, ItemStream
from colocated_grpo.environments.streams import json_bytes
from colocated_grpo.settings.generation import SkipSolvedConfig
from colocated_grpo.types import Group, JsonObject

REMEMBERED = 1 << 17
"""Maximum count of items with a stored number, above the row count of common datasets. Every checkpoint contains all
stored numbers."""
KEY = "solved"
"""Key of the stream's own state, in addition to the keys of the stream that it draws from."""


class UnsolvedItems(ItemStream):
    """The items of another stream without those that were solved in their last `after` visits.

    If all items of a pass are skipped, every item is visited again.
    """

    def __init__(self, stream: ItemStream, name: str, config: SkipSolvedConfig) -> None:
        self._stream = stream
        self.max_attempts = stream.max_attempts
        self._name = name
        self._config = config
        self._numbers: dict[str, int] = {}
        """Consecutive solved visits of each item, by key_of(item). The least recently visited item comes first."""
        self._skipped = 0
        """Items skipped since the last `record`."""

    def take(self) -> Item:
        for _ in range(self.max_attempts):
            item = self._stream.take()
            if self._numbers.get(key_of(item), 0) < self._config.after:
                return item
            self._skipped += 1
        self._numbers.clear()
        return self._stream.take()

    def reject(self, item: Item) -> None:
        self._stream.reject(item)

    def record(self, groups: Sequence[Group]) -> BatchResult:
        for group in groups:
            key = key_of(group.prompt.item)
            number = self._numbers.pop(key, 0)
            [reward, *others] = {rollout.score.reward for rollout in group.rollouts}
            if not others and reward is not None and reward >= self._config.reward:
                self._numbers[key] = number + 1  # inserted at the end: the dict is ordered by last visit
        while len(self._numbers) > REMEMBERED:
            del self._numbers[next(iter(self._numbers))]
        result = self._stream.record(groups)
        metrics, self._skipped = {f"prompts_skipped/{self._name}": float(self._skipped)}, 0
        return replace(result, metrics=result.metrics | metrics)

    def state_dict(self) -> JsonObject:
        return {**self._stream.state_dict(), KEY: {"numbers": dict(self._numbers), "skipped": self._skipped}}

    def load_state_dict(self, state: JsonObject) -> None:
        self._stream.load_state_dict(state)
        own = state.get(KEY, {"numbers": {}, "skipped": 0})  # missing in checkpoints of runs without this setting
        self._numbers, self._skipped = dict(own["numbers"]), own["skipped"]


def key_of(item: Item) -> str:
    """Return a short hash of an item. Items with equal prompts but different columns have different hashes."""
    return blake2b(json_bytes(item), digest_size=8).hexdigest()
