"""Scoring of a dataset by reward functions, some of them in worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    """Weighted sum of reward functions. As in TRL, None is left out of the sum; if all are None, the reward is None.

    Functions of weight 0 are left out as well, whatever they return or raise.
    """

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
        summed = [(function.weight, result) for function, result in named if function.weight != 0]
        weighted = [weight * result.value for weight, result in summed if result.value is not None]
        if not weighted or any(result.error is not None and result.value is None for _, result in summed):
            # Without a reward, an error means that scoring failed: not where only a function of weight 0 raised.
            return Score(reward=None, parts=parts, error=_errors(result for _, result in summed))
        return Score(reward=sum(weighted), parts=parts, error=_errors(results))


def _errors(results: Iterable[FunctionResult]) -> str | None:
    """Return one line; functions whose process has ended have the same error."""
    return "; ".join(dict.fromkeys(result.error for result in results if result.error is not None)) or None
