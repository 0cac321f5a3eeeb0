"""Adapters for environments of other libraries, by library. A library is imported only when a config names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from colocated_grpo.environments.adapters.gymnasium import Gymnasium
from colocated_grpo.environments.adapters.openenv import OpenEnv
from colocated_grpo.environments.adapters.textarena import TextArena
from colocated_grpo.environments.adapters.textarena_turns import TextArenaTurns
from colocated_grpo.environments.adapters.verifiers import build_verifiers
from colocated_grpo.environments.agents.episode import AgentTasks
from colocated_grpo.environments.base import EnvironmentSetupError, Episode
from colocated_grpo.environments.turns.base import TurnEnvironment
from colocated_grpo.environments.user_code.loading import construct
from colocated_grpo.types import JsonObject


class Adapter(NamedTuple):
    """Classes and functions that play a library's environments."""

    argument: str
    """Argument that may follow the colon of a name: 'textarena:TicTacToe-v0' is short for args.game."""
    episode: Callable[..., Episode | AgentTasks]
    turns: Callable[..., TurnEnvironment] | None = None


ADAPTERS = {
    "gymnasium": Adapter("environment", Gymnasium),
    "openenv": Adapter("url", OpenEnv),
    "textarena": Adapter("game", TextArena, TextArenaTurns),
    "verifiers": Adapter("taskset", build_verifiers),
}
FORMS = tuple(f"{library}:<{adapter.argument}>" for library, adapter in ADAPTERS.items())
"""Names of episodes in error lines."""
TURN_FORMS = tuple(f"{library}:<{adapter.argument}>" for library, adapter in ADAPTERS.items() if adapter.turns)
"""Names of turn environments in error lines."""


def is_adapted(name: str) -> bool:
    """Return whether a config names a library here, with or without ':argument'."""
    return name.partition(":")[0] in ADAPTERS


def build_adapter(name: str, args: JsonObject) -> Episode | AgentTasks:
    """Build the episode of 'library:argument', or of 'library' with the argument in args."""
    adapter, args = _adapter(name, args)
    return construct(adapter.episode, args, f"environments {name!r}")


def turn_adapter(name: str, args: JsonObject) -> tuple[Callable[..., TurnEnvironment], JsonObject]:
    """Return the class of a turn environment and its arguments except the seed."""
    adapter, args = _adapter(name, args)
    if adapter.turns is None:
        raise EnvironmentSetupError(f"environments {name!r}: it cannot be played turn by turn; it is a type: episode")
    return adapter.turns, args


def _adapter(name: str, args: JsonObject) -> tuple[Adapter, JsonObject]:
    """Return the adapter of a name, and `args` with the argument after the colon added."""
    library, _, argument = name.partition(":")
    adapter = ADAPTERS[library]
    if argument and adapter.argument in args:
        raise EnvironmentSetupError(
            f"environments {name!r}: args.{adapter.argument}={args[adapter.argument]!r}: "
            "the name gives this argument already; leave it out"
        )
    return adapter, args | ({adapter.argument: argument} if argument else {})
