"""Scoring of a dataset by reward functions, some of them in worker processes."""

from __future__ import annotations

from collections.abc import Sequence

from colocated_grpo.environments.base import Item
from colocated_grpo.environments.rewards.functions import (
    NOT_COLUMNS,
    FunctionResult,
    RewardFunction,
    RewardInputs,
    results_of,
)
from colocated_grpo.environments.rewards.workers import RewardWorkers
from colocated_grpo.types import Completion, Prompt, Score


class RewardScorer:
    """Weighted sum of reward functions. As in TRL, None is left out of the sum; if all are None, the reward is None."""

    def __init__(
        self, functions: Sequence[RewardFunction], max_steps: int, workers: RewardWorkers | None = None
    ) -> None:
        """workers: processes that run some of the functions. The others run in the calling thread."""
        self.functions = functions
        self.max_steps = max_steps
        self.workers = workers

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        inputs = RewardInputs(
            item=prompt.item,
            texts=texts,
            completion_ids=[completion.token_ids for completion in completions],
            global_step=completions[0].policy_version,
            max_steps=self.max_steps,
        )
        remote = {} if self.workers is None else self.workers.results(inputs)
        by_function = [
            remote[function.name] if function.name in remote else results_of(function, inputs)
            for function in self.functions
        ]
        return [self._combine(results) for results in zip(*by_function, strict=True)]

    def check_item(self, item: Item) -> None:
        """Raise EnvironmentSetupError if a function needs a column that the item lacks, or messages and gets text."""
        for function in self.functions:
            function.check_columns(item.keys() - NOT_COLUMNS)
            if isinstance(item["prompt"], str):
                function.check_text(item)

    def _combine(self, results: Sequence[FunctionResult]) -> Score:
        named = list(zip(self.functions, results, strict=True))
        parts = {name: value for result in results for name, value in result.metrics.items()}
        parts |= {function.name: result.value for function, result in named if result.value is not None}
        error = "; ".join(result.error for result in results if result.error is not None) or None
        if any(result.error is not None and result.value is None for result in results):
            return Score(reward=None, parts=parts, error=error)
        weighted = [function.weight * result.value for function, result in named if result.value is not None]
        return Score(reward=sum(weighted) if weighted else None, parts=parts, error=error)
