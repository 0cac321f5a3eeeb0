"""Order of training items: from easy to hard, by recent pass rate of each prompt, or without solved prompts."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b

from colocated_grpo.environments.base import BatchResult, Item, ItemStream
from colocated_grpo.environments.streams import Rows, RowStream, row_at
from colocated_grpo.settings.generation import SkipSolvedConfig
from colocated_grpo.settings.sources import ColumnCurriculumConfig, PassRateCurriculumConfig
from colocated_grpo.types import Group, JsonObject

REMEMBERED = 1 << 17
"""Maximum count of items with a stored number, above the row count of common datasets. Every checkpoint contains all
stored numbers."""
STAGES = "stages"
"""Key under which `EasyToHard` stores its own state, in addition to the keys of its base."""


class SkippedItems:
    """Base of an `ItemStream` that draws from another stream and skips some of its items for a while.

    If all items of a pass are skipped, the next item is returned anyway.
    """

    key = ""
    """Key under which this stream stores its own state, in addition to the keys of the stream that it draws from."""

    def __init__(self, stream: ItemStream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._numbers: dict[str, int] = {}
        """A number of at least 1 for each item, by key_of(item). The least recently visited item comes first."""
        self._skipped = 0
        """Items skipped since the last `record`."""

    @property
    def max_attempts(self) -> int:
        return self._stream.max_attempts

    def take(self) -> Item:
        for _ in range(self.max_attempts):
            item = self._stream.take()
            if not self._skips(key_of(item)):
                return item
            self._skipped += 1
        self._all_skipped()
        return self._stream.take()

    def reject(self, item: Item) -> None:
        self._stream.reject(item)

    def record(self, groups: Sequence[Group]) -> BatchResult:
        for group in groups:
            key = key_of(group.prompt.item)
            number = self._number_after(group, self._numbers.pop(key, 0))
            if number:
                self._numbers[key] = number  # inserted at the end: the dict is ordered by last visit
        while len(self._numbers) > REMEMBERED:
            del self._numbers[next(iter(self._numbers))]
        result = self._stream.record(groups)
        metrics, self._skipped = self._metrics(), 0
        return replace(result, metrics=result.metrics | metrics)

    def _skips(self, key: str) -> bool:
        """Return True if the item is skipped this time. May change the item's number."""
        raise NotImplementedError

    def _all_skipped(self) -> None:
        """Called if all items of a pass are skipped."""

    def _number_after(self, group: Group, number: int) -> int:
        """Return the item's number after a visit; 0 removes the item. number: the item's number before the visit."""
        raise NotImplementedError

    def _metrics(self) -> dict[str, float]:
        raise NotImplementedError

    def state_dict(self) -> JsonObject:
        return {**self._stream.state_dict(), self.key: {"numbers": dict(self._numbers), "skipped": self._skipped}}

    def load_state_dict(self, state: JsonObject) -> None:
        self._stream.load_state_dict(state)
        own = state.get(self.key, {"numbers": {}, "skipped": 0})  # missing in checkpoints of runs without this setting
        self._numbers, self._skipped = dict(own["numbers"]), own["skipped"]


class UnsolvedItems(SkippedItems):
    """Skips items that were solved in their last `after` visits.

    The number of an item counts its consecutive solved visits. If all items of a pass are skipped, all numbers are
    removed, so that every item is visited again.
    """

    key = "solved"

    def __init__(self, stream: ItemStream, name: str, config: SkipSolvedConfig) -> None:
        super().__init__(stream, name)
        self._config = config

    def _skips(self, key: str) -> bool:
        return self._numbers.get(key, 0) >= self._config.after

    def _all_skipped(self) -> None:
        self._numbers.clear()

    def _number_after(self, group: Group, number: int) -> int:
        rewards = {rollout.score.reward for rollout in group.rollouts}
        [reward, *others] = rewards
        solved = not others and reward is not None and reward >= self._config.reward
        return number + 1 if solved else 0

    def _metrics(self) -> dict[str, float]:
        return {f"prompts_skipped/{self._name}": float(self._skipped)}


class RestingItems(SkippedItems):
    """Skips an item for some turns if its last pass rate was out of bounds.

    The number of an item counts its remaining turns.
    """

    key = "resting"

    def __init__(self, stream: ItemStream, name: str, config: PassRateCurriculumConfig) -> None:
        super().__init__(stream, name)
        self._config = config

    def _skips(self, key: str) -> bool:
        turns = self._numbers.pop(key, 0)
        if turns > 1:
            self._numbers[key] = turns - 1
        return turns > 0

    def _number_after(self, group: Group, number: int) -> int:
        rate = pass_rate(group, self._config.pass_reward)
        rests = rate is not None and not self._config.low <= rate <= self._config.high
        return self._config.rest if rests else 0

    def _metrics(self) -> dict[str, float]:
        return {
            f"curriculum/{self._name}/passed_over": float(self._skipped),
            f"curriculum/{self._name}/resting": float(len(self._numbers)),
        }


def key_of(item: Item) -> str:
    """Return a short hash of an item. Items with equal prompts but different columns have different hashes."""

    def name_of_type(value: object) -> str:
        return type(value).__name__  # a value that JSON lacks, such as an image

    text = json.dumps(item, sort_keys=True, default=name_of_type)
    return blake2b(text.encode(), digest_size=8).hexdigest()


class EasyToHard(RowStream):
    """Rows of a dataset in stages. Each stage draws passes over the easiest rows; the last stage draws all rows.

    A stage begins after a step, never within a step. A stage with more or fewer rows than the previous stage begins
    with a new pass.
    """

    def __init__(
        self,
        name: str,
        rows: Rows,
        to_item: Callable[[int], Item],
        seed: int | None,
        difficulties: Sequence[float],
        config: ColumnCurriculumConfig,
    ) -> None:
        """difficulties: one number for each row. seed: None orders each pass from easy to hard."""
        super().__init__(name, rows, to_item, seed)
        self._order = sorted(range(self.size), key=lambda index: difficulties[index])
        self._sizes = stage_sizes([difficulties[index] for index in self._order], config.stages)
        self._layout: JsonObject = {"column": config.column, "order": config.order, "sizes": self._sizes}
        """Identity of the stages. Progress that was saved with a different layout is ignored."""
        self._config = config
        self._steps = 0
        """Steps recorded so far."""
        self._stage = 0
        self._drawn = 0
        """Rows drawn since the number of rows of the stage last changed."""
        self._rates: list[float] = []
        """Pass rates of the latest prompts of the stage, at most config.window. Empty if config.steps decides."""

    @property
    def max_attempts(self) -> int:
        return self._rows_of_stage

    @property
    def _rows_of_stage(self) -> int:
        return self._sizes[self._stage]

    def take(self) -> Item:
        item = self.to_item(self._order[row_at(self._rows_of_stage, self.seed, self._drawn)])
        self._drawn += 1
        self.taken += 1
        return item

    def record(self, groups: Sequence[Group]) -> BatchResult:
        result = super().record(groups)
        metrics = {
            f"curriculum/{self.name}/stage": float(self._stage + 1),
            f"curriculum/{self.name}/rows": float(self._rows_of_stage),
        }
        self._steps += 1
        if self._config.high is not None:
            rates = [rate for group in groups if (rate := pass_rate(group, self._config.pass_reward)) is not None]
            self._rates = (self._rates + rates)[-self._config.window :]
        self._go_to(self._next_stage())
        return replace(result, metrics=result.metrics | metrics)

    def _next_stage(self) -> int:
        """Return the stage of the next step."""
        last = len(self._sizes) - 1
        if self._config.steps is not None:
            return min(last, self._steps * last // self._config.steps)
        assert self._config.high is not None  # exactly one of steps and high is set
        if len(self._rates) < self._config.window:
            return self._stage
        rate = math.fsum(self._rates) / len(self._rates)
        if rate > self._config.high:
            return min(last, self._stage + 1)
        return max(0, self._stage - 1) if rate < self._config.low else self._stage

    def _go_to(self, stage: int) -> None:
        if stage == self._stage:
            return
        if self._sizes[stage] != self._rows_of_stage:
            self._drawn = 0
        self._stage = stage
        self._rates = []

    def state_dict(self) -> JsonObject:
        stage = {"steps": self._steps, "stage": self._stage, "drawn": self._drawn, "rates": list(self._rates)}
        return {**super().state_dict(), STAGES: {**stage, **self._layout}}

    def load_state_dict(self, state: JsonObject) -> None:
        super().load_state_dict(state)
        beginning: JsonObject = {"steps": 0, "stage": 0, "drawn": 0, "rates": []}
        saved = state.get(STAGES, beginning)
        if any(saved.get(key) != value for key, value in self._layout.items()):  # saved under another layout, or none
            saved = beginning
        self._steps, self._stage, self._drawn = saved["steps"], saved["stage"], saved["drawn"]
        self._rates = list(saved["rates"])


def stage_sizes(difficulties: Sequence[float], stages: int) -> list[int]:
    """Return how many of the easiest rows each stage draws from. Rows of equal difficulty join the same stage."""
    size = len(difficulties)
    ends = [math.ceil(size * stage / stages) for stage in range(1, stages + 1)]
    return [bisect_right(difficulties, difficulties[end - 1]) for end in ends]


def pass_rate(group: Group, pass_reward: float) -> float | None:
    """Return the fraction of the rewards that are at least `pass_reward`; None if no completion has a reward."""
    rewards = [rollout.score.reward for rollout in group.rollouts if rollout.score.reward is not None]
    return sum(reward >= pass_reward for reward in rewards) / len(rewards) if rewards else None
