"""Reward functions in TRL's signature, and the scoring of a dataset by them, some of it in worker processes."""

import ast
import inspect
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

from colocated_grpo.environments.base import EnvironmentSetupError, Item
from colocated_grpo.environments.rewards import builtin, judge, run_code, scoring
from colocated_grpo.environments.rewards.workers import Answer, Started, WorkerPool
from colocated_grpo.environments.user_code import loading
from colocated_grpo.runtime.user_code import is_user_code
from colocated_grpo.settings.sources import RewardConfig, names_model
from colocated_grpo.settings.tree import copy_nested
from colocated_grpo.types import Completion, Prompt, Score

NEEDS_PROCESS = (
    "signal.alarm() fails in threads; name the function as file.py:function with run_in: process, or remove the timeout"
)
NOT_COLUMNS = {"prompt", "completion", "completion_ids"}
"""Item keys that are not passed as columns, as in TRL."""
PROVIDED = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
"""Arguments of reward functions that are not columns of an item."""
NEEDS_MESSAGES = (
    "it reads messages, but completions are text, as the prompts are; set system_prompt or give messages as prompts"
)
BUILT_IN: dict[str, Callable[..., object]] = {**builtin.REWARDS, "judge": judge.Judge, "run_code": run_code.RunCode}
"""Built-in reward functions by name. A class is constructed with `args`."""
TRL = "trl.rewards."
KEYWORD_KINDS = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInputs:
    """One prompt and its completions, as plain data that can be sent to another process."""

    item: Item
    texts: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    global_step: int
    """Completed optimizer steps of the weights that sampled the completions."""
    max_steps: int


class WrongNumberOfRewards(Exception):
    """A function did not return one reward per completion, so rewards cannot be assigned to completions."""


SYSTEMATIC = (WrongNumberOfRewards, EnvironmentSetupError)
"""Exceptions that are not caused by a single completion."""


class RewardFunction:
    """A reward function with its name, its weight and the keyword arguments that it accepts."""

    def __init__(self, name: str, weight: float, function: Callable[..., object], *, relative: bool = False) -> None:
        """relative: the function compares the completions of a prompt, so it is always called with all of them."""
        self.name = name
        self.weight = weight
        self.function = function
        self.relative = relative
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError as error:
            problem = f"{name!r} has no readable signature"
            raise EnvironmentSetupError(f"rewards: {problem}: {loading.one_line(error)}") from None
        named = [parameter for parameter in parameters if parameter.kind in KEYWORD_KINDS]
        self.accepts_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        self.accepted = {parameter.name for parameter in named}
        self.required = {parameter.name for parameter in named if parameter.default is parameter.empty} - PROVIDED
        self.required |= set(getattr(function, "required_columns", ()))
        self._check_with_text = str(getattr(function, "__module__", "")).startswith(TRL)

    def check_columns(self, columns: set[str]) -> None:
        """Raise EnvironmentSetupError if a required column is missing."""
        if missing := sorted(self.required - columns):
            is_verl = any(name.startswith("solution_str") for name in missing)
            guide = "from_verl.md" if is_verl else "from_trl.md#reward-functions"
            available = f"available: {', '.join(sorted(columns)) or 'none'}"
            advice = f"(rename one with `columns`; called as in docs/guides/{guide})"
            if not (is_verl or self.accepts_all or self.accepted & PROVIDED):
                advice = f"(if it is a factory, give its `args`: docs/guides/{guide})"
            raise EnvironmentSetupError(f"reward {self.name!r} needs the column {missing[0]!r}; {available} {advice}")

    def check_text(self, item: Item) -> None:
        """Raise EnvironmentSetupError if a TRL function needs messages: it is called once, with a text prompt."""
        if not self._check_with_text:
            return
        self._check_with_text = False
        inputs = RewardInputs(item=item, texts=["x"], completion_ids=[[0]], global_step=0, max_steps=1)
        [result] = scores_of(self, inputs)
        if result.error is not None and NEEDS_MESSAGES in result.error:
            raise EnvironmentSetupError(f"reward {self.name!r}: {NEEDS_MESSAGES}")

    def scores(self, inputs: RewardInputs) -> list[Score]:
        """Call the function once for all completions. Exceptions of the function propagate."""
        arguments, count = _arguments(inputs), len(inputs.texts)
        metrics: dict[str, float] = {}
        arguments["log_metric"] = lambda name, value: metrics.update({str(name): float(value)})
        accepted = arguments if self.accepts_all else {key: arguments[key] for key in arguments if key in self.accepted}
        result = scoring.resolve_awaitable(self.function(**accepted))
        # Iterating over a mapping would yield its keys, and over a set its values in arbitrary order.
        if not isinstance(result, Iterable) or isinstance(result, str | Mapping | Set):
            raise WrongNumberOfRewards(f"returned {result!r} for {count} completions, not a list of {count} numbers")
        sized = isinstance(result, Sized)
        values = list(result if sized else islice(result, count + 1))  # a generator may be endless
        if len(values) != count:
            number = len(values) if sized or len(values) < count else f"more than {count}"
            returned = f"{number} reward{'s' * (number != 1)}"
            raise WrongNumberOfRewards(f"{returned} for {count} completion{'s' * (count != 1)}")
        return [self._score(value, metrics) for value in values]

    def _score(self, value: object, metrics: dict[str, float]) -> Score:
        if isinstance(value, scoring.NoReward):
            return Score(reward=None, error=f"{self.name}: {value}", parts=metrics)
        try:
            return Score(reward=scoring.as_number(value), parts=metrics)
        except (TypeError, ValueError, OverflowError) as error:
            return Score(reward=None, error=f"{self.name}: {loading.one_line(error)}")


def scores_of(function: RewardFunction, inputs: RewardInputs) -> list[Score]:
    """Call the function for all completions or, if that raises, for each. `parts`: the metrics that it logged."""

    def explain(error: BaseException) -> str:
        line = f"{function.name}: {loading.one_line(error)}"
        is_text = isinstance(inputs.item["prompt"], str)
        if is_text and isinstance(error, TypeError) and str(error).startswith("string indices must be integers"):
            return f"{line}: {NEEDS_MESSAGES}"
        return f"{line}: {NEEDS_PROCESS}" if scoring.sets_alarm(error) else line

    worst = max if function.weight < 0 else min
    try:
        function.check_columns(inputs.item.keys() - NOT_COLUMNS)
        return function.scores(inputs)
    except BaseException as error:  # see scoring.score_each
        if function.relative or len(inputs.texts) == 1 or isinstance(error, SYSTEMATIC):
            failed = Score(reward=scoring.reward_of_unscorable(error, [], worst), error=explain(error))
            return [failed] * len(inputs.texts)
    pairs = zip(inputs.texts, inputs.completion_ids, strict=True)
    split = [replace(inputs, texts=[text], completion_ids=[token_ids]) for text, token_ids in pairs]
    return scoring.score_each([lambda one=one: function.scores(one)[0] for one in split], explain, worst)


def _arguments(inputs: RewardInputs) -> dict[str, object]:
    """Return TRL's keyword arguments. Completions are strings for a text prompt, messages for a chat prompt."""
    item, count = copy_nested(inputs.item), len(inputs.texts)  # a function may change it; others must not see that
    chat = not isinstance(prompt := item["prompt"], str)
    return {
        **{key: [value] * count for key, value in item.items() if key not in NOT_COLUMNS},
        "prompts": [prompt] * count,
        "completions": [[{"role": "assistant", "content": text}] for text in inputs.texts] if chat else [*inputs.texts],
        "completion_ids": [[*token_ids] for token_ids in inputs.completion_ids],
        # The part of TRL's trainer state that reward schedules read.
        "trainer_state": SimpleNamespace(global_step=inputs.global_step, max_steps=inputs.max_steps),
        # In TRL, log_extra adds columns to a table of completions. There is no such table here.
        "log_extra": lambda column, values: None,
    }


def build_rewards(configs: Sequence[RewardConfig], key: str) -> list[RewardFunction]:
    """Build the functions of a dataset's `rewards`, under unique names."""
    # Last part of "organization/model" or of "module:outer.<locals>.function"
    given = [config.name for config in configs]
    short = [Path(n).name if names_model(n) else n.rpartition(":")[2].rpartition(".")[2] for n in given]
    names = loading.unique_names(short, "_")
    return [load_reward(name, config, key) for name, config in zip(names, configs, strict=True)]


def check_reward_name(name: str, key: str) -> None:
    """Raise EnvironmentSetupError unless `name` is built in or has the form of user code or of a reward model."""
    if name not in BUILT_IN and ":" not in name and not names_model(name):
        module, dot, function = name.rpartition(".")
        if dot:  # a dotted Python name: built-in rewards have no dot
            rule = f"names no function; write {name}:FUNCTION" if function == "py" else f"write {module}:{function}"
            raise EnvironmentSetupError(f"{key}: {name!r}: {rule}")
        forms = ("module:function", "path/to/file.py:function", "organization/reward-model")
        raise loading.unknown_name(key, "reward", name, [*BUILT_IN, *forms])


def load_reward(name: str, config: RewardConfig, key: str) -> RewardFunction:
    found, args = config.given, config.args
    if found is None and names_model(config.name):
        # Imported here: it imports torch, which takes half a gigabyte in each worker process.
        from colocated_grpo.environments.rewards.reward_model import RewardModel

        found, args = RewardModel, {**(args or {}), "name": config.name}
    elif found is None:
        check_reward_name(config.name, key)
        found = BUILT_IN[config.name] if config.name in BUILT_IN else loading.load_object(config.name, key)
    if args is not None or isinstance(found, type):
        found = loading.construct(found, args or {}, f"{key}: {config.name}")
    return RewardFunction(
        name, config.weight, loading.check_callable(found, config.name, key), relative=config.relative
    )


DEVICE_LIBRARIES = {"cupy", "jax", "sentence_transformers", "tensorflow", "torch", "transformers", "triton", "vllm"}
"""Libraries that use device memory. The import of such a library takes seconds, and half a gigabyte in each process."""
NOT_SENDABLE = (pickle.PicklingError, TypeError, AttributeError, RecursionError)
"""Errors that pickle raises for an object that it cannot serialize."""


@dataclass(eq=False)
class RewardScorer:
    """Weighted sum of reward functions. As in TRL, None is left out; so is weight 0, whatever such a function does."""

    functions: Sequence[RewardFunction]
    max_steps: int
    workers: "RewardWorkers | None" = None
    """Processes that run some of the functions. All other functions run in the calling thread."""

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
            remote[function.name] if function.name in remote else scores_of(function, inputs)
            for function in self.functions
        ]
        by_completion = zip(*by_function, strict=True) if by_function else [()] * len(texts)
        return [self._combine(results) for results in by_completion]

    def check_item(self, item: Item) -> None:
        """Raise EnvironmentSetupError if a function lacks a column or messages, or if the prompt has images."""
        if images := [name for name in ("image", "images") if item.get(name) not in (None, [], "")]:
            raise EnvironmentSetupError(f"prompts have no images here; remove or rename the column {images[0]!r}")
        for function in self.functions:
            function.check_columns(item.keys() - NOT_COLUMNS)
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


@dataclass(eq=False)
class RewardWorkers:
    """The worker processes that run reward functions of one dataset."""

    names: Sequence[str]
    pool: WorkerPool

    def results(self, inputs: RewardInputs) -> dict[str, list[Score]]:
        """Return the results by function name. If the process ends, functions without a result count as failed."""
        responses: list[list[Score]] = []
        try:
            responses, error = self.pool.ask(inputs, names=[f"{name}: " for name in self.names])
        except NOT_SENDABLE as problem:
            error = f"run_in: cannot send the prompt to a process: {loading.one_line(problem)}; set thread"
        failed = {name: [Score(reward=None, error=error)] * len(inputs.texts) for name in self.names}
        return failed | dict(zip(self.names, responses, strict=False))


def load_functions(named: Sequence[tuple[str, RewardConfig]], key: str) -> tuple[Started, Answer]:
    """Load functions in a worker process. A request is one RewardInputs, which is passed to all functions."""
    functions: list[RewardFunction] = []
    try:
        functions += [load_reward(name, config, key) for name, config in named]
        started = Started(modules=sorted(DEVICE_LIBRARIES & sys.modules.keys()))
    except EnvironmentSetupError as error:
        started = Started(error=str(error))
    return started, lambda inputs: (scores_of(function, inputs) for function in functions)


def start_workers(
    configs: Sequence[RewardConfig], functions: Sequence[RewardFunction], key: str
) -> RewardWorkers | None:
    """Return the processes of the functions that run in processes; None if there are no such functions.

    `run_in: auto` means threads if a process cannot load all these functions, or loads any of DEVICE_LIBRARIES.
    """
    # Functions of weight 0 are called last: if such a function ends the process, no completion loses its reward.
    pairs = sorted(zip(functions, configs, strict=True), key=lambda pair: pair[1].weight == 0)
    chosen = [(f.name, c) for f, c in pairs if c.run_in == "process" or (c.run_in == "auto" and _suits(c, f.function))]
    forced = [(name, config) for name, config in chosen if config.run_in == "process"]
    for named in filter(None, (chosen, forced)):
        pool = WorkerPool(partial(load_functions, named, key))
        started = pool.start().wait_until_started()
        if started.error is None and (named == forced or not started.modules):
            return RewardWorkers([name for name, _ in named], pool)
        pool.close()
        if named == forced:
            raise EnvironmentSetupError(f"{key}: {started.error}; it was loaded in a process (run_in)")
    return None


def _suits(config: RewardConfig, function: Callable[..., object]) -> bool:
    """Return True for a user's plain function, not a coroutine, without signs of device memory or shared state."""
    # A function that the program has passed may use any object of the program.
    by_name = config.name not in BUILT_IN and config.args is None and config.given is None
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
