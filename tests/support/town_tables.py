"""Helpers for the tests of town: tables with a fixed cast, single nights, and whole games."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from colocated_grpo.environments.town.environment import TownEnvironment, TownSettings, TownTurn
from colocated_grpo.environments.town.legality import WAIT, ArgumentSpec, LegalActions, legal_actions
from colocated_grpo.environments.town.phases import enter, resolve_night, to_act
from colocated_grpo.environments.town.players import SCRIPTED, reply, scripted_turn
from colocated_grpo.environments.town.state import NAMES, Event, Game, Phase, Rules, Seat, new_game, restore_game
from colocated_grpo.environments.town.verdicts import Verdict, judge


def table(*roles: str, **rules: int) -> Game:
    """Return a game before its first phase: Ada has the first role, Bram the second ..., citizens fill up to seven."""
    game = Game(0, 0, Rules(**rules), [Seat(name, "citizen", "random") for name in NAMES[: max(7, len(roles))]])
    for seat, role in zip(game.seats, roles, strict=False):
        seat.become(role)
    return game


def seat(game: Game, name: str) -> Seat:
    return game.seats[game.index(name)]


def night(game: Game, choices: dict[str, str], jailed: str | None = None, day: int | None = None) -> None:
    """Play one night of legal choices. Example: night(game, {"Ada": "kill Bram", "Cleo": "alert"})"""
    game.phase, game.day = Phase.NIGHT, day or game.day
    game.prisoner = game.index(jailed) if jailed else -1
    game.choices = {}
    for name, choice in choices.items():
        tag, _, target = choice.partition(" ")
        verdict = judge(game, game.index(name), reply(tag, target))
        assert verdict.code == "ok", f"{name}: {choice}: {verdict.code} {verdict.detail}"
        game.choices[game.index(name)] = (tag, target)
    resolve_night(game)


def dead(game: Game) -> set[str]:
    return {each.name for each in game.seats if not each.alive}


def private_texts(game: Game, name: str) -> list[str]:
    """Return the texts of the events that this seat saw and not all seats did."""
    return [event.text for event in game.events if event.audience and game.index(name) in event.audience]


def kinds(game: Game) -> list[str]:
    return [event.kind for event in game.events]


def events_of(game: Game, kind: str) -> list[Event]:
    return [event for event in game.events if event.kind == kind]


def judged(game: Game, name: str, completion: str) -> Verdict:
    return judge(game, game.index(name), completion)


def play_game(
    seed: int, seats: int | list[str] = 9, players: tuple[str, ...] = ("sensible",), rules: Rules | None = None
) -> Game:
    """Return a finished game of scripted players. seats: their number, or the cast."""
    game = new_game(0, seed, seats, list(players), rules or Rules())
    enter(game)
    while game.phase is not Phase.OVER:
        seat = to_act(game)[0]
        scripted_turn(game, seat, SCRIPTED[game.seats[seat].player])
    return game


def random_games(count: int, seats: int | None = None, players: tuple[str, ...] = ("random",)) -> Iterator[Game]:
    """Yield each of `count` games before every action. Without `seats`, their sizes cycle from 7 to 15."""
    for seed in range(count):
        game = new_game(seed, seed, seats or 7 + seed % 9, list(players), Rules(max_days=5))
        enter(game)
        while game.phase is not Phase.OVER:
            yield game
            actor = to_act(game)[0]
            scripted_turn(game, actor, SCRIPTED[game.seats[actor].player])


def random_reply(turn: TownTurn, rng: Random) -> str:
    legal = legal_of(turn)
    tag = rng.choice(list(legal))
    return reply(tag, argument_for(legal[tag], rng))


def legal_of(turn: TownTurn) -> LegalActions:
    return legal_actions(restore_game(turn.state), turn.seat)


def argument_for(spec: ArgumentSpec, rng: Random) -> str:
    word = f"word{rng.randrange(1000)}"
    parts = [rng.choice(spec.options)] if spec.options else []
    return ": ".join([*parts, word] if spec.text else parts)


def play(environment: TownEnvironment, commits: int, seed: int = 0) -> list[tuple[str, str, float]]:
    """Commit random replies, some malformed or illegal; return (turn id, reply, reward) of each."""
    history = []
    while len(history) < commits:
        for turn in environment.next_batch():
            rng = Random(f"{seed}/{turn.id}")
            answer = rng.choice([random_reply(turn, rng)] * 6 + ["nonsense", reply("vote", "nobody"), reply(WAIT)])
            history.append((turn.id, answer, environment.commit(turn, answer).reward))
            if len(history) == commits:
                break
    return history


def small_town(**settings: Any) -> TownEnvironment:
    """Return an environment of three games of at most three days."""
    return TownEnvironment(TownSettings(**{"games": 3, "seed": 4, "rules": Rules(max_days=3), **settings}))
