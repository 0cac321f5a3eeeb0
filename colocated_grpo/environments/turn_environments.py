"""Turn environments by name: built in, installed, or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points

from colocated_grpo.config.schema import Config
from colocated_grpo.config.turns import TurnsSourceConfig
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.open_town import open_town
from colocated_grpo.environments.tossim import ToSSim
from colocated_grpo.environments.turn_base import TurnEnvironment
from colocated_grpo.environments.turns import Factory, TurnGames
from colocated_grpo.environments.user_code import construct, load_object, one_line, unknown_name

ENTRY_POINTS = "colocated_grpo.turn_environments"
"""Group in which an installed package names its factories."""


TURN_ENVIRONMENTS: dict[str, Callable[..., TurnEnvironment]] = {"town": open_town, "tossim": ToSSim}


def turn_factory(config: TurnsSourceConfig) -> Factory:
    """Builds the environment from a seed. Names and arguments are complained about in one line."""
    key = f"environments {config.name!r}"
    if "seed" in config.args:
        raise EnvironmentSetupError(f"{key}: args.seed is not yours to give: games are seeded by the run's `seed`")
    found = _find(config.name, key)

    def build(seed: int) -> TurnEnvironment:
        environment = construct(partial(found, seed=seed), config.args, key)
        if not isinstance(environment, TurnEnvironment):
            surface = [name for name in dir(TurnEnvironment) if not name.startswith("_")]
            missing = [name for name in surface if not hasattr(environment, name)]
            raise EnvironmentSetupError(f"{key}: not a turn environment, it has no {', '.join(missing)}")
        return environment

    return build


def _find(name: str, key: str) -> Callable[..., TurnEnvironment]:
    if name in TURN_ENVIRONMENTS:
        return TURN_ENVIRONMENTS[name]
    if ":" in name:
        return load_object(name, key)
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in installed:
        forms = ["module:object", "path/to/file.py:object"]
        raise unknown_name("environments", "turn environment", name, [*TURN_ENVIRONMENTS, *installed, *forms])
    try:
        return installed[name].load()
    except (Exception, SystemExit) as error:
        raise EnvironmentSetupError(f"{key}: cannot load {installed[name].value!r}: {one_line(error)}") from error


def turn_games(name: str, entry: TurnsSourceConfig, config: Config) -> TurnGames:
    """One entry of the config, checked against the rest of it."""
    loss = config.loss
    games = TurnGames(name, turn_factory(entry), entry, config.seed)
    if games.delayed and loss.correction.mode == "off" and loss.old_logprobs == "trainer":
        raise EnvironmentSetupError(
            f"environments {name!r}: its turns are trained after the end of their game, with newer weights than "
            "they were sampled with; loss.correction.mode=off would not correct for that"
        )
    return games
