"""Which reward functions run in worker processes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.rewards.functions import BUILT_IN, RewardFunction
from colocated_grpo.environments.rewards.workers import DEVICE_LIBRARIES, RewardWorkers
from colocated_grpo.environments.user_code.loading import FOREIGN_PREFIXES
from colocated_grpo.settings.sources import RewardConfig


def start_workers(
    configs: Sequence[RewardConfig], functions: Sequence[RewardFunction], key: str
) -> RewardWorkers | None:
    """Return the processes for the functions that run in them; None if there is none.

    `auto` chooses threads for functions that a process cannot load, or that import a library of DEVICE_LIBRARIES.
    """
    pairs = [(function, config) for function, config in zip(functions, configs, strict=True)]
    chosen = [(f.name, c) for f, c in pairs if c.run_in == "process" or (c.run_in == "auto" and _suits(c, f.function))]
    forced = [(name, config) for name, config in chosen if config.run_in == "process"]
    for named in (chosen, forced):
        if not named:
            return None
        workers = RewardWorkers(named, key)
        started = workers.started()
        if started.error is None and (named == forced or not started.device_libraries):
            return workers
        workers.close()
        if named == forced:
            raise EnvironmentSetupError(f"{started.error}; it was loaded in a process (run_in)")
    return None


def _suits(config: RewardConfig, function: Callable[..., Any]) -> bool:
    """Return True for a plain function of the user whose file has no sign of device memory or shared state.

    The built-in functions take linear time, and run in threads. So do coroutines, which share the connections and the
    limits of one event loop.
    """
    if config.name in BUILT_IN or config.args is not None or not inspect.isfunction(function):
        return False
    if config.given is not None:  # it may use any object of the program
        return False
    file = function.__code__.co_filename
    if inspect.iscoroutinefunction(function) or file.startswith(FOREIGN_PREFIXES):
        return False
    try:
        nodes = list(ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))))
    except (OSError, ValueError, SyntaxError):
        return False
    return not any(isinstance(node, ast.Global) for node in nodes) and not _imported(nodes) & DEVICE_LIBRARIES


def _imported(nodes: Sequence[ast.AST]) -> set[str]:
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}
