"""Streams of dataset rows that follow a curriculum: from easy to hard, or by the recent pass rate of each prompt."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

from colocated_grpo.environments.base import BatchResult, Item
from colocated_grpo.environments.solved import REMEMBERED, key_of
from colocated_grpo.environments.streams import ItemStream, Rows, RowStream, row_at
from colocated_grpo.settings.sources import ColumnCurriculumConfig, PassRateCurriculumConfig
from colocated_grpo.types import Group, JsonObject

STAGES, RESTING = "stages", "resting"
"""Keys of the state of these streams, beside those of the stream that they are made of."""


class EasyToHard(RowStream):
    """Rows of a dataset in stages: each stage draws passes over the easiest rows, and the last one over all.

    A stage begins after a step, never within one, and with a new pass if it has more rows than the one before.
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
        """difficulties: of each row. seed: None reads each pass from easy to hard."""
        super().__init__(name, rows, to_item, seed)
        self._order = sorted(range(self.size), key=lambda index: difficulties[index])
        self._sizes = stage_sizes([difficulties[index] for index in self._order], config.stages)
        self._layout: JsonObject = {"column": config.column, "order": config.order, "sizes": self._sizes}
        """Identity of the stages: progress saved under another one does not apply."""
        self._config = config
        self._steps = 0
        """Steps recorded so far."""
        self._stage = 0
        self._drawn = 0
        """Rows drawn since the first pass of the stage began."""
        self._rates: list[float] = []
        """Pass rates of the latest prompts of the stage, at most config.window; none if steps decide."""

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
        if any(saved.get(key) != value for key, value in self._layout.items()):  # no curriculum, or another
            saved = beginning
        self._steps, self._stage, self._drawn = saved["steps"], saved["stage"], saved["drawn"]
        self._rates = list(saved["rates"])


def stage_sizes(difficulties: Sequence[float], stages: int) -> list[int]:
    """Return how many of the rows, sorted by difficulty, each stage draws from. Equal difficulties stay together."""
    size = len(difficulties)
    ends = [math.ceil(size * stage / stages) for stage in range(1, stages + 1)]
    return [bisect_right(difficulties, difficulties[end - 1]) for end in ends]


class RestingItems:
    """An `ItemStream` in which items rest for some turns if their last visit was outside the bounds of the pass rate.

    If every item rests, the next one is drawn all the same.
    """

    def __init__(self, stream: ItemStream, name: str, config: PassRateCurriculumConfig) -> None:
        self._stream = stream
        self._name = name
        self._config = config
        self._turns: dict[str, int] = {}
        """Remaining turns (at least 1) by item, least recently visited first."""
        self._passed_over = 0
        """Items passed over since the last `record`."""

    @property
    def max_attempts(self) -> int:
        return self._stream.max_attempts

    def take(self) -> Item:
        for _ in range(self.max_attempts):
            item = self._stream.take()
            key = key_of(item)
            turns = self._turns.pop(key, 0)
            if not turns:
                return item
            if turns > 1:
                self._turns[key] = turns - 1
            self._passed_over += 1
        return self._stream.take()

    def reject(self, item: Item) -> None:
        self._stream.reject(item)

    def record(self, groups: Sequence[Group]) -> BatchResult:
        for group in groups:
            key = key_of(group.prompt.item)
            self._turns.pop(key, None)
            rate = pass_rate(group, self._config.pass_reward)
            if rate is not None and not self._config.low <= rate <= self._config.high:
                self._turns[key] = self._config.rest
        while len(self._turns) > REMEMBERED:
            del self._turns[next(iter(self._turns))]
        result = self._stream.record(groups)
        metrics = {
            f"curriculum/{self._name}/passed_over": float(self._passed_over),
            f"curriculum/{self._name}/resting": float(len(self._turns)),
        }
        self._passed_over = 0
        return replace(result, metrics=result.metrics | metrics)

    def state_dict(self) -> JsonObject:
        resting = {"turns": dict(self._turns), "passed_over": self._passed_over}
        return {**self._stream.state_dict(), RESTING: resting}

    def load_state_dict(self, state: JsonObject) -> None:
        self._stream.load_state_dict(state)
        # Missing in checkpoints of runs without this curriculum.
        resting = state.get(RESTING, {"turns": {}, "passed_over": 0})
        self._turns, self._passed_over = dict(resting["turns"]), resting["passed_over"]


def pass_rate(group: Group, pass_reward: float) -> float | None:
    """Return the fraction of completions whose reward is at least `pass_reward`; None if none has a reward."""
    rewards = [rollout.score.reward for rollout in group.rollouts if rollout.score.reward is not None]
    return sum(reward >= pass_reward for reward in rewards) / len(rewards) if rewards else None
