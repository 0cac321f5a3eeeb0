"""Construction of turn environments by name: built in, adapted from another library, installed, or user code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from colocated_grpo.environments.adapters import TURN_FORMS, is_adapted, turn_adapter
from colocated_grpo.environments.adapters.tossim import ToSSim
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.registry import find_object
from colocated_grpo.environments.town.from_config import open_town
from colocated_grpo.environments.turns.base import TurnEnvironment
from colocated_grpo.environments.turns.games import EnvironmentFactory, TurnGames
from colocated_grpo.environments.user_code.loading import construct
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.turns import TurnsSourceConfig

TURN_ENVIRONMENTS: dict[str, Callable[..., TurnEnvironment]] = {"town": open_town, "tossim": ToSSim}


def turn_factory(config: TurnsSourceConfig) -> EnvironmentFactory:
    """Return the function that builds the environment from a seed. Raises EnvironmentSetupError."""
    key = f"environments {config.name!r}"
    if "seed" in config.args:
        raise EnvironmentSetupError(f"{key}: args.seed is set by the run; remove it")
    if is_adapted(config.name):
        found, args = turn_adapter(config.name, config.args)
    else:
        found, args = find_object("turn environment", config.name, TURN_ENVIRONMENTS, *TURN_FORMS), config.args

    def build(seed: int) -> TurnEnvironment:
        environment = construct(partial(found, seed=seed), args, key)
        if not isinstance(environment, TurnEnvironment):
            members = [name for name in dir(TurnEnvironment) if not name.startswith("_")]
            missing = [name for name in members if not hasattr(environment, name)]
            raise EnvironmentSetupError(f"{key}: not a turn environment, it has no {', '.join(missing)}")
        return environment

    return build


def build_turn_games(name: str, entry: TurnsSourceConfig, config: Config) -> TurnGames:
    """Build the games of one config entry. Rejects loss settings that cannot train delayed turns."""
    loss = config.loss
    games = TurnGames(name, turn_factory(entry), entry, config.seed)
    if games.delayed and loss.correction.mode == "off" and loss.old_logprobs == "trainer":
        raise EnvironmentSetupError(
            f"loss.correction.mode=off: turns of {name!r} train after the end of their game, with newer weights than "
            "sampled them, and need importance weights; set another mode, or loss.old_logprobs=sampling"
        )
    return games
