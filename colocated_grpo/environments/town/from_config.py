"""Town from the arguments of a config."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter

from colocated_grpo.config.turns import FROZEN
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.town.environment import TownEnvironment
from colocated_grpo.environments.town.players import SCRIPTED
from colocated_grpo.environments.town.rewards import CREDITS, Credit
from colocated_grpo.environments.town.settings import POLICY, TownSettings
from colocated_grpo.environments.town.state import Rules
from colocated_grpo.environments.user_code.loading import resolve_mode, unknown_name


def open_town(seed: int, **args: Any) -> TownEnvironment:
    """Arguments: the fields of TownSettings. `credit` may be the name of a mode."""
    _check_names("args", TownSettings, args)
    _check_names("args.rules", Rules, args.get("rules"))
    _check_names("args.credit", Credit, args.get("credit"))
    args = resolve_mode(args, "credit", CREDITS, "environments 'town'")
    for label in args.get("players", ()):
        if label not in (known := (POLICY, FROZEN, *SCRIPTED)):
            raise unknown_name("environments 'town': args.players", "player", label, known)
    settings = TypeAdapter(TownSettings).validate_python({**args, "seed": seed})
    if POLICY not in settings.players:
        raise EnvironmentSetupError(
            f"environments 'town': args.players={list(settings.players)}: the policy plays none, so there is no turn "
            "to train on"
        )
    return TownEnvironment(settings)


def _check_names(key: str, kind: type, given: Any) -> None:
    names = [each.name for each in fields(kind)]
    for name in given if isinstance(given, dict) else ():
        if name not in names:
            raise unknown_name(f"environments 'town': {key}", "setting", name, names)
