"""Finds environments by name: built in, of another library, or user code. Only what a config names is imported."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from inspect import iscoroutinefunction, signature
from typing import Any, NamedTuple

from colocated_grpo.environments.base import EnvironmentSetupError, Episode, Task
from colocated_grpo.environments.user_code.loading import construct, load_object, unknown_name
from colocated_grpo.settings.errors import raise_on
from colocated_grpo.settings.evaluation import EvaluationSetConfig
from colocated_grpo.settings.sources import EnvironmentConfig
from colocated_grpo.types import JsonObject


class Adapter(NamedTuple):
    """Adapter for the environments of another library."""

    argument: str
    """Argument that may follow the colon of a name. Example: 'textarena:TicTacToe-v0' sets args.game."""
    factory: str


class Kind(NamedTuple):
    """Environments of one `type`. Factories are written 'module:object'; modules are relative to environments/."""

    noun: str
    built_in: Mapping[str, str]
    adapters: Mapping[str, Adapter]


TASKS = {
    "arithmetic": "tasks.procedural:Arithmetic",
    "countdown": "tasks.procedural:Countdown",
    "reversal": "tasks.procedural:Reversal",
    "sorting": "tasks.procedural:Sorting",
    "town_lessons": "town.environment:TownLessons",
}
EPISODES = {"tool_use": "tasks.tool_use:ToolUse"}
LIBRARIES = {
    "openenv": Adapter("url", "adapters.openenv:OpenEnv"),
    "textarena": Adapter("game", "adapters.textarena:TextArena"),
}
TURN_ENVIRONMENTS = {"town": "town.environment:open_town", "tossim": "adapters.tossim:ToSSim"}
KINDS = {
    "task": Kind("task", TASKS, {"reasoning_gym": Adapter("dataset", "tasks.procedural:ReasoningGym")}),
    "episode": Kind("episode", EPISODES, LIBRARIES),
    "turns": Kind("turn environment", TURN_ENVIRONMENTS, {}),
}


def check_names(environments: Iterable[EnvironmentConfig], sets: Iterable[EvaluationSetConfig]) -> None:
    """Raise ConfigError with a line for each unknown environment or reward. For the launcher: imports no user code."""
    from colocated_grpo.environments.rewards.functions import check_reward_name

    keyed: list[tuple[EnvironmentConfig, str | None]] = [(source, None) for source in environments]
    keyed += [(entry.source, f"evaluation set {entry.name!r}") for entry in sets]
    lines = []
    for source, key in keyed:
        try:
            if source.type in KINDS and getattr(source, "given", None) is None:
                check_name(KINDS[source.type], source.name, key or "environments")
            for reward in getattr(source, "rewards", ()):
                if reward.given is None:
                    check_reward_name(reward.name, f"{key or f'environments {source.name!r}'}: rewards")
        except EnvironmentSetupError as error:
            lines.append(str(error))
    raise_on(*lines)


def check_name(kind: Kind, name: str, key: str = "environments") -> None:
    """Raise EnvironmentSetupError unless `name` is built in, adapted, or has the form of user code."""
    if (library := name.partition(":")[0]) in kind.adapters or name in kind.built_in:
        return
    if kind.noun == "turn environment" and library in KINDS["episode"].adapters:
        raise EnvironmentSetupError(f"environments {name!r}: it cannot be played turn by turn; it is a type: episode")
    if ":" not in name:
        adapted = [f"{library}:<{adapter.argument}>" for library, adapter in kind.adapters.items()]
        valid = [*kind.built_in, *adapted, "module:object", "path/to/file.py:object"]
        raise unknown_name(key, kind.noun, name, valid)


def find(kind: Kind, name: str, args: JsonObject) -> tuple[Any, JsonObject]:
    """Return the object called `name`, and `args` with the argument in the name. Raises EnvironmentSetupError."""
    check_name(kind, name)
    library, _, argument = name.partition(":")
    key = f"environments {name!r}"
    if adapter := kind.adapters.get(library):
        if argument and adapter.argument in args:
            given = f"args.{adapter.argument}={args[adapter.argument]!r}"
            raise EnvironmentSetupError(f"{key}: {given}: the name gives this argument already; leave it out")
        return _own(adapter.factory), args | ({adapter.argument: argument} if argument else {})
    return (_own(kind.built_in[name]) if name in kind.built_in else load_object(name, key)), args


def _own(factory: str) -> Callable[..., object]:
    module, _, name = factory.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), name)


def build_task(name: str, args: JsonObject, given: object = None) -> Task:
    """Return the task called `name`. given: the task or its class, if the user's program passed it directly."""
    return _built(KINDS["task"], name, args, given, "a task", "score")


def build_episode(name: str, args: JsonObject, given: object = None) -> Episode:
    """Return the episode called `name`. given: as in build_task."""
    episode = _built(KINDS["episode"], name, args, given, "an episode", "run")
    if not iscoroutinefunction(episode.run):
        raise EnvironmentSetupError(f"environments {name!r}: run() must be a coroutine: write `async def run`")
    try:
        signature(episode.run).bind(None, None)
    except TypeError as error:
        rule = "must be called as `run(self, item, model)`"
        raise EnvironmentSetupError(f"environments {name!r}: run() {rule}: {error}") from None
    return episode


def _built(kind: Kind, name: str, args: JsonObject, given: Any, what: str, method: str) -> Any:
    """Return the task or episode; a class, which each adapter is, is called with args.

    method: the method that it needs besides prompts().
    """
    found, args = find(kind, name, args) if given is None else (given, args)
    key = f"environments {name!r}"
    if isinstance(found, type):
        found = construct(found, args, key)
    elif args:
        raise EnvironmentSetupError(f"{key}: args={args}: the object is an instance, not a class; remove args")
    missing = [each for each in ("prompts", method) if not callable(getattr(found, each, None))]
    if missing:
        lacks = " and no ".join(f"{each}()" for each in missing)
        raise EnvironmentSetupError(f"{key}: not {what}, it has no {lacks}")
    return found
