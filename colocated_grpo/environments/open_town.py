"""Town from the arguments of a config."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter

from colocated_grpo.config.turns import FROZEN
from colocated_grpo.environments.town.environment import TownEnvironment
from colocated_grpo.environments.town.players import SCRIPTED
from colocated_grpo.environments.town.rewards import CREDITS
from colocated_grpo.environments.town.settings import POLICY, TownSettings
from colocated_grpo.environments.user_code import unknown_name


def open_town(seed: int, **args: Any) -> TownEnvironment:
    """Arguments: the fields of TownSettings. `credit` may be the name of a mode."""
    names = [each.name for each in fields(TownSettings)]
    for name in args:
        if name not in names:
            raise unknown_name("environments 'town': args", "setting", name, names)
    credit, players = args.get("credit"), args.get("players", ())
    if isinstance(credit, str):
        if credit not in CREDITS:
            raise unknown_name("environments 'town': args.credit", "mode", credit, CREDITS)
        args = {**args, "credit": CREDITS[credit]}
    for label in players:
        if label not in (known := (POLICY, FROZEN, *SCRIPTED)):
            raise unknown_name("environments 'town': args.players", "player", label, known)
    return TownEnvironment(TypeAdapter(TownSettings).validate_python({**args, "seed": seed}))
