"""Episodes made of environments of other libraries. None is imported before a config names it."""

from __future__ import annotations

from typing import Any, NamedTuple

from colocated_grpo.environments.adapters.gymnasium import Gymnasium
from colocated_grpo.environments.adapters.openenv import OpenEnv
from colocated_grpo.environments.adapters.textarena import TextArena
from colocated_grpo.environments.adapters.verifiers import Verifiers
from colocated_grpo.environments.base import EnvironmentSetupError, Episode
from colocated_grpo.environments.user_code import construct


class Adapter(NamedTuple):
    episode: type[Episode]
    argument: str
    """What stands behind the colon: 'textarena:TicTacToe-v0' is short for args.game."""


ADAPTERS = {
    "gymnasium": Adapter(Gymnasium, "environment"),
    "openenv": Adapter(OpenEnv, "url"),
    "textarena": Adapter(TextArena, "game"),
    "verifiers": Adapter(Verifiers, "taskset"),
}
FORMS = tuple(f"{library}:<{adapter.argument}>" for library, adapter in ADAPTERS.items())


def is_adapted(name: str) -> bool:
    return name.partition(":")[0] in ADAPTERS


def build_adapter(name: str, args: dict[str, Any]) -> Episode:
    """From 'library:argument', or 'library' with the argument among the args."""
    key = f"environments {name!r}"
    library, _, given = name.partition(":")
    episode, argument = ADAPTERS[library]
    if given and argument in args:
        raise EnvironmentSetupError(f"{key}: args.{argument}={args[argument]!r} is given as well; leave it out")
    return construct(episode, args | ({argument: given} if given else {}), key)
