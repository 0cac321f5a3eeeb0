"""Town from the arguments of a config."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.town.environment import TownEnvironment
from colocated_grpo.environments.town.players import SCRIPTED
from colocated_grpo.environments.town.rewards import CREDITS
from colocated_grpo.environments.town.settings import POLICY, TownSettings
from colocated_grpo.environments.user_code import unknown_name, with_named


def open_town(seed: int, **args: Any) -> TownEnvironment:
    """Arguments: the fields of TownSettings. `credit` may be the name of a mode."""
    names = [each.name for each in fields(TownSettings)]
    for name in args:
        if name not in names:
            raise unknown_name("environments 'town': args", "setting", name, names)
    args = with_named(args, "credit", CREDITS, "environments 'town'")
    for label in args.get("players", ()):
        if label not in (POLICY, *SCRIPTED):
            raise EnvironmentSetupError(
                f"environments 'town': args.players: {label!r} would need a second model; a seat is played by "
                f"{POLICY!r} or by one of {', '.join(SCRIPTED)}"
            )
    return TownEnvironment(TypeAdapter(TownSettings).validate_python({**args, "seed": seed}))
