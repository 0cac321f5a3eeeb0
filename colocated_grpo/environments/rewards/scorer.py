"""Scoring of a dataset by reward functions, some of them in worker processes."""

from __future__ import annotations

import ast
import inspect
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from colocated_grpo.environments.base import EnvironmentSetupError, Item
from colocated_grpo.environments.rewards import functions as rewards
from colocated_grpo.environments.rewards.functions import RewardFunction, RewardInputs
from colocated_grpo.environments.rewards.workers import Answer, Started, WorkerPool
from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.runtime.user_code import is_user_code
from colocated_grpo.settings.sources import RewardConfig
from colocated_grpo.types import Completion, Prompt, Score

DEVICE_LIBRARIES = {"cupy", "jax", "sentence_transformers", "tensorflow", "torch", "transformers", "triton", "vllm"}
"""Libraries that use device memory. The import of such a library takes seconds, and half a gigabyte of memory in each
process."""
NOT_SENDABLE = (pickle.PicklingError, TypeError, AttributeError, RecursionError)
"""Errors that pickle raises for an object that it cannot serialize."""


class RewardScorer:
    """Weighted sum of reward functions.

    As in TRL, results of None are left out of the sum; if all results are None, the reward is None. Functions of weight
    0 are left out as well, whatever they return or raise.
    """

    def __init__(
        self, functions: Sequence[RewardFunction], max_steps: int, workers: RewardWorkers | None = None
    ) -> None:
        """workers: processes that run some of the functions. All other functions run in the calling thread."""
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
            remote[function.name] if function.name in remote else rewards.scores_of(function, inputs)
            for function in self.functions
        ]
        by_completion = zip(*by_function, strict=True) if by_function else [()] * len(texts)
        return [self._combine(results) for results in by_completion]

    def check_item(self, item: Item) -> None:
        """Raise EnvironmentSetupError if a function needs a missing column, or needs messages but gets text."""
        for function in self.functions:
            function.check_columns(item.keys() - rewards.NOT_COLUMNS)
            if isinstance(item["prompt"], str):
                function.check_text(item)

    def _combine(self, results: Sequence[Score]) -> Score:
        named = list(zip(self.functions, results, strict=True))
        parts = {name: value for result in results for name, value in result.parts.items()}
        parts |= {function.name: result.reward for function, result in named if result.reward is not None}
        summed = [(function.weight, result) for function, result in named if function.weight != 0]
        weighted = [weight * result.reward for weight, result in summed if result.reward is not None]
        if not weighted or any(result.failed for _, result in summed):
            # An error without a reward means that scoring failed, unless only a function of weight 0 raised.
            return Score(reward=None, parts=parts, error=_errors(result for _, result in summed))
        return Score(reward=sum(weighted), parts=parts, error=_errors(results))


def _errors(results: Iterable[Score]) -> str | None:
    """Return all different errors as one line. If a process ends, its functions have the same error."""
    return "; ".join(dict.fromkeys(result.error for result in results if result.error is not None)) or None


class RewardWorkers:
    """The worker processes that run reward functions of one dataset."""

    def __init__(self, named: Sequence[tuple[str, RewardConfig]], key: str) -> None:
        """named: (name, config) of each function. The first process is started at once."""
        # Functions of weight 0 are called last: if such a function ends the process, no completion loses its reward.
        named = sorted(named, key=lambda one: one[1].weight == 0)
        self._names = [name for name, _ in named]
        self._pool = WorkerPool(partial(load_functions, named, key))
        self.first = self._pool.start()
        self.close = self._pool.close

    def results(self, inputs: RewardInputs) -> dict[str, list[Score]]:
        """Return the results by function name. If the process ends, functions without a result count as failed."""
        responses: list[list[Score]] = []
        try:
            responses, error = self._pool.ask(inputs, count=len(self._names))
        except NOT_SENDABLE as problem:
            error = f"run_in: cannot send the prompt to a process: {one_line(problem)}; set thread"
        failed = {name: [Score(reward=None, error=error)] * len(inputs.texts) for name in self._names}
        return failed | dict(zip(self._names, responses, strict=False))


def load_functions(named: Sequence[tuple[str, RewardConfig]], key: str) -> tuple[Started, Answer]:
    """Load functions in a worker process. A request is one RewardInputs, which is passed to all functions."""
    functions: list[RewardFunction] = []
    try:
        functions += [rewards.load_reward(name, config, key) for name, config in named]
        started = Started(modules=sorted(DEVICE_LIBRARIES & sys.modules.keys()))
    except EnvironmentSetupError as error:
        started = Started(error=str(error))
    return started, lambda inputs: (rewards.scores_of(function, inputs) for function in functions)


def start_workers(
    configs: Sequence[RewardConfig], functions: Sequence[RewardFunction], key: str
) -> RewardWorkers | None:
    """Return the processes of the functions that run in processes; None if there are no such functions.

    Functions with `run_in: auto` run in threads if a process cannot load all functions chosen for processes, or if one
    of these functions imports a library of DEVICE_LIBRARIES.
    """
    pairs = list(zip(functions, configs, strict=True))
    chosen = [(f.name, c) for f, c in pairs if c.run_in == "process" or (c.run_in == "auto" and _suits(c, f.function))]
    forced = [(name, config) for name, config in chosen if config.run_in == "process"]
    for named in (chosen, forced):
        if not named:
            return None
        workers = RewardWorkers(named, key)
        started = workers.first.wait_until_started()
        if started.error is None and (named == forced or not started.modules):
            return workers
        workers.close()
        if named == forced:
            raise EnvironmentSetupError(f"{key}: {started.error}; it was loaded in a process (run_in)")
    return None


def _suits(config: RewardConfig, function: Callable[..., object]) -> bool:
    """Return True for a plain function of the user whose file has no sign of device memory or shared state.

    Built-in functions take linear time and run in threads. Coroutines do not run in processes either, because they
    share the connections and the limits of one event loop.
    """
    # A function that the program has passed may use any object of the program.
    by_name = config.name not in rewards.BUILT_IN and config.args is None and config.given is None
    if not by_name or not inspect.isfunction(function):
        return False
    file = function.__code__.co_filename
    if inspect.iscoroutinefunction(function) or not is_user_code(file):
        return False
    try:
        nodes = list(ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))))
    except (OSError, ValueError, SyntaxError):
        return False
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    shares_state = any(isinstance(node, ast.Global) for node in nodes)
    return not shares_state and not {name.partition(".")[0] for name in imported} & DEVICE_LIBRARIES
