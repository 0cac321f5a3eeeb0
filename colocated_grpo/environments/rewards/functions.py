"""Reward functions in TRL's signature, as the scorer of a dataset."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from colocated_grpo.config.sources import RewardConfig
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.rewards.builtin import REWARDS
from colocated_grpo.environments.rewards.scoring import as_number, settle
from colocated_grpo.environments.user_code.loading import construct, load_object, one_line, unknown_name
from colocated_grpo.types import Completion, Prompt, Score

NOT_COLUMNS = {"prompt", "completion", "completion_ids"}
GIVEN = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
NAMED = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """The part of TRL's trainer state that reward schedules read."""

    global_step: int
    """Completed optimizer steps of the weights that sampled the completion."""
    max_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One function's word on one completion."""

    value: float | None = None
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class WrongNumberOfRewards(ValueError):
    """The function does not keep one reward per completion, so no value can be told to belong to one."""


class RewardFunction:
    """A user's function with its name, its weight and the keyword arguments that it takes."""

    def __init__(self, name: str, weight: float, function: Callable[..., Any]) -> None:
        self.name = name
        self.weight = weight
        self.function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError as error:
            raise EnvironmentSetupError(f"rewards: {name!r} has no signature to read: {one_line(error)}") from None
        self.takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        self.takes = {parameter.name for parameter in parameters if parameter.kind in NAMED}
        self.needs = {
            parameter.name
            for parameter in parameters
            if parameter.kind in NAMED and parameter.default is inspect.Parameter.empty
        } - GIVEN

    def check_columns(self, columns: set[str]) -> None:
        if missing := sorted(self.needs - columns):
            raise EnvironmentSetupError(
                f"reward {self.name!r} needs the column {missing[0]!r}; there is: {', '.join(sorted(columns))} "
                "(rename one with `columns`)"
            )

    def outcomes(self, arguments: dict[str, Any], count: int) -> list[Outcome]:
        """Call once for `count` completions; raises what the function raises."""
        metrics: dict[str, float] = {}
        arguments["log_metric"] = lambda name, value: metrics.update({str(name): float(value)})
        accepted = arguments if self.takes_all else {key: arguments[key] for key in arguments if key in self.takes}
        result = settle(self.function(**accepted))
        # Iterated, a mapping would give its keys and a set its values in an order of its own.
        if not isinstance(result, Iterable) or isinstance(result, str | Mapping | Set):
            raise WrongNumberOfRewards(f"{result!r} for {count} completions, not a list of {count} numbers")
        endless = not isinstance(result, Sized)  # as a generator may be
        values = list(islice(result, count + 1) if endless else result)
        if len(values) != count:
            number = f"more than {count}" if endless and len(values) > count else len(values)
            raise WrongNumberOfRewards(f"{number} rewards for {count} completions")
        return [self._outcome(value, metrics) for value in values]

    def _outcome(self, value: Any, metrics: Mapping[str, float]) -> Outcome:
        try:
            return Outcome(value=as_number(value), metrics=metrics)
        except (TypeError, ValueError, OverflowError) as error:
            return Outcome(error=f"{self.name}: {one_line(error)}")


class RewardScorer:
    """Weighted sum of reward functions. None leaves a function out of the sum; all None give no reward, as in TRL."""

    def __init__(self, functions: Sequence[RewardFunction], max_steps: int) -> None:
        self.functions = functions
        self.max_steps = max_steps

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        by_function = [self._call(function, prompt, completions, texts) for function in self.functions]
        return [self._combine(outcomes) for outcomes in zip(*by_function, strict=True)]

    def check_columns(self, item: dict[str, Any]) -> None:
        """Raise one line if a function wants a column that the item lacks."""
        for function in self.functions:
            function.check_columns(item.keys() - NOT_COLUMNS)

    def _call(
        self, function: RewardFunction, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> list[Outcome]:
        """All at once; if that raises, one by one, so that only the completions that cause it lose their reward."""
        try:
            function.check_columns(prompt.item.keys() - NOT_COLUMNS)
            return function.outcomes(self._arguments(prompt, completions, texts), len(completions))
        except BaseException as error:  # see score_text
            hopeless = isinstance(error, (WrongNumberOfRewards, EnvironmentSetupError))
            if hopeless or len(completions) == 1:
                return [Outcome(error=f"{function.name}: {one_line(error)}")] * len(completions)
        pairs = zip(completions, texts, strict=True)
        return [outcome for one, text in pairs for outcome in self._call(function, prompt, [one], [text])]

    def _arguments(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> dict[str, Any]:
        """TRL's keyword arguments: plain strings for a text prompt, message lists for a chat prompt."""
        count = len(completions)
        chat = not isinstance(prompt.item["prompt"], str)
        return {
            **{key: [value] * count for key, value in prompt.item.items() if key not in NOT_COLUMNS},
            "prompts": [prompt.item["prompt"]] * count,
            "completions": [[{"role": "assistant", "content": text}] for text in texts] if chat else list(texts),
            "completion_ids": [list(completion.token_ids) for completion in completions],
            "trainer_state": TrainerState(global_step=completions[0].policy_version, max_steps=self.max_steps),
            # TRL's table of completions has no counterpart here; functions that write to it still run.
            "log_extra": lambda column, values: None,
        }

    def _combine(self, outcomes: Sequence[Outcome]) -> Score:
        named = list(zip(self.functions, outcomes, strict=True))
        parts = {name: value for outcome in outcomes for name, value in outcome.metrics.items()}
        parts |= {function.name: outcome.value for function, outcome in named if outcome.value is not None}
        if errors := [outcome.error for outcome in outcomes if outcome.error is not None]:
            return Score(reward=None, parts=parts, error="; ".join(errors))
        weighted = [function.weight * outcome.value for function, outcome in named if outcome.value is not None]
        return Score(reward=sum(weighted) if weighted else None, parts=parts)


def build_rewards(configs: Sequence[RewardConfig], key: str) -> list[RewardFunction]:
    """The functions of a dataset's `rewards`, under unique names."""
    functions: list[RewardFunction] = []
    taken: dict[str, int] = {}
    for config in configs:
        short = config.name.rpartition(":")[2]
        taken[short] = taken.get(short, 0) + 1
        name = short if taken[short] == 1 else f"{short}_{taken[short]}"
        functions.append(RewardFunction(name, config.weight, _load(config, key)))
    return functions


def check_reward_name(name: str, key: str) -> None:
    """Raise one line where `name` is neither built in nor written as the user's own code is."""
    if name not in REWARDS and ":" not in name:
        raise unknown_name(key, "reward", name, [*REWARDS, "module:function", "path/to/file.py:function"])


def _load(config: RewardConfig, key: str) -> Callable[..., Any]:
    check_reward_name(config.name, key)
    found = REWARDS[config.name] if config.name in REWARDS else load_object(config.name, key)
    if config.args is not None or isinstance(found, type):
        found = construct(found, config.args or {}, f"{key}: {config.name}")
    if not callable(found):
        raise EnvironmentSetupError(f"{key}: {config.name!r} is a {type(found).__name__}, not a function")
    return found
