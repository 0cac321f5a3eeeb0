"""Builds town from the arguments of a config: as a turn environment, or as lessons to warm-start a model."""

from collections.abc import Iterator
from dataclasses import fields

from pydantic import TypeAdapter

from colocated_grpo.environments.base import EnvironmentSetupError, Item, Split
from colocated_grpo.environments.town.environment import POLICY, TownEnvironment, TownSettings
from colocated_grpo.environments.town.players import SCRIPTED
from colocated_grpo.environments.town.rewards import CREDITS, Credit
from colocated_grpo.environments.town.state import Rules
from colocated_grpo.environments.user_code.loading import resolve_mode, unknown_name
from colocated_grpo.settings.turns import FROZEN

KEY = "environments 'town'"


def open_town(seed: int, **args: object) -> TownEnvironment:
    """Build the environment. args: fields of TownSettings, where `credit` may be the name of a mode.

    Raises EnvironmentSetupError for an unknown name, and pydantic's ValidationError for a value out of bounds.
    """
    _check_names("args", TownSettings, args)
    _check_names("args.rules", Rules, args.get("rules"))
    _check_names("args.credit", Credit, args.get("credit"))
    args = resolve_mode(args, "credit", CREDITS, KEY)
    for label in args.get("players", ()):
        if label not in (known := (POLICY, FROZEN, *SCRIPTED)):
            raise unknown_name(f"{KEY}: args.players", "player", label, known)
    settings = TypeAdapter(TownSettings).validate_python({**args, "seed": seed})
    if POLICY not in settings.players:
        raise EnvironmentSetupError(
            f"{KEY}: args.players={list(settings.players)}: no seat is played by the policy, so there is nothing to "
            f"train; add {POLICY!r}"
        )
    return TownEnvironment(settings)


def _check_names(key: str, settings: type, given: object) -> None:
    """Raise EnvironmentSetupError for a key of the dict `given` that is not a field of the dataclass `settings`."""
    names = [each.name for each in fields(settings)]
    for name in given if isinstance(given, dict) else ():
        if name not in names:
            raise unknown_name(f"{KEY}: {key}", "setting", name, names)


SPLIT_SEEDS = {"train": 0, "held_out": 1}


class TownLessons:
    """Args are those of the turn environment 'town'.

    The sensible player plays every seat, and "answer" is its reply.
    """

    def __init__(self, **args: object) -> None:
        self._args = args
        self._judge = open_town(seed=0, **args)

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        town = open_town(seed=2 * seed + SPLIT_SEEDS[split], **self._args)
        while True:
            for turn in town.next_batch():
                yield {"prompt": turn.messages, "answer": town.advice(turn), "turn": turn}
                town.play_on(turn)

    def score(self, item: Item, completion: str) -> dict[str, float]:
        """Return 1 for a legal reply, else 0. Move quality is not scored: whole games train it."""
        [outcome] = self._judge.score(item["turn"], [completion])
        return {"reward": outcome.parts["legal_rate"], "parse_rate": outcome.parts["parse_rate"]}
