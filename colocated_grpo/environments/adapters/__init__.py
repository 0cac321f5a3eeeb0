"""Environments of other libraries. None is imported before a config names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from colocated_grpo.environments.adapters.gymnasium import Gymnasium
from colocated_grpo.environments.adapters.openenv import OpenEnv
from colocated_grpo.environments.adapters.textarena import TextArena
from colocated_grpo.environments.adapters.textarena_turns import TextArenaTurns
from colocated_grpo.environments.adapters.verifiers import Verifiers
from colocated_grpo.environments.base import EnvironmentSetupError, Episode
from colocated_grpo.environments.turns.base import TurnEnvironment
from colocated_grpo.environments.user_code.loading import construct


class Adapter(NamedTuple):
    argument: str
    """What stands behind the colon: 'textarena:TicTacToe-v0' is short for args.game."""
    episode: type[Episode]
    turns: Callable[..., TurnEnvironment] | None = None


ADAPTERS = {
    "gymnasium": Adapter("environment", Gymnasium),
    "openenv": Adapter("url", OpenEnv),
    "textarena": Adapter("game", TextArena, TextArenaTurns),
    "verifiers": Adapter("taskset", Verifiers),
}
FORMS = tuple(f"{library}:<{adapter.argument}>" for library, adapter in ADAPTERS.items())
TURN_FORMS = tuple(f"{library}:<{adapter.argument}>" for library, adapter in ADAPTERS.items() if adapter.turns)


def is_adapted(name: str) -> bool:
    return name.partition(":")[0] in ADAPTERS


def build_adapter(name: str, args: dict[str, Any]) -> Episode:
    """From 'library:argument', or 'library' with the argument among the args."""
    adapter, args = _adapter(name, args)
    return construct(adapter.episode, args, f"environments {name!r}")


def turn_adapter(name: str, args: dict[str, Any]) -> tuple[Callable[..., TurnEnvironment], dict[str, Any]]:
    """The turn environment behind such a name, and all of its arguments but the seed."""
    adapter, args = _adapter(name, args)
    if adapter.turns is None:
        raise EnvironmentSetupError(f"environments {name!r}: has no seats to play turn by turn; it is a type: episode")
    return adapter.turns, args


def _adapter(name: str, args: dict[str, Any]) -> tuple[Adapter, dict[str, Any]]:
    library, _, given = name.partition(":")
    adapter = ADAPTERS[library]
    if given and adapter.argument in args:
        raise EnvironmentSetupError(
            f"environments {name!r}: args.{adapter.argument}={args[adapter.argument]!r} is given as well; leave it out"
        )
    return adapter, args | ({adapter.argument: given} if given else {})
