"""Tables for the tests of town: casts in a fixed order, single nights, and games driven from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from colocated_grpo.environments.town.casting import NAMES
from colocated_grpo.environments.town.environment import TownEnvironment, Turn
from colocated_grpo.environments.town.grammar import WAIT
from colocated_grpo.environments.town.legality import Form, Slot
from colocated_grpo.environments.town.night import resolve_night
from colocated_grpo.environments.town.phases import begin, to_act
from colocated_grpo.environments.town.players import SCRIPTED, reply, scripted_turn
from colocated_grpo.environments.town.state import Event, Game, Phase, Rules, Seat, new_game
from colocated_grpo.environments.town.verdicts import Verdict, judge


def table(*roles: str, **rules: int) -> Game:
    """A game before its first phase: Ada has the first role, Bram the second, and so on, then citizens up to seven."""
    game = Game(0, 0, Rules(**rules), [Seat(name, "citizen", "random") for name in NAMES[: max(7, len(roles))]])
    for seat, role in zip(game.seats, roles, strict=False):
        seat.become(role)
    return game


def seat(game: Game, name: str) -> Seat:
    return game.seats[game.index(name)]


def night(game: Game, choices: dict[str, str], jailed: str | None = None, day: int | None = None) -> None:
    """One night: {"Ada": "kill Bram", "Cleo": "alert"}. Only legal choices are taken."""
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


def told(game: Game, name: str) -> list[str]:
    """Texts of the events that this seat alone, or its circle, noticed."""
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
    """A finished game of scripted players. `seats`: how many, or the cast itself."""
    game = new_game(0, seed, seats, list(players), rules or Rules())
    begin(game)
    while game.phase is not Phase.OVER:
        seat = to_act(game)[0]
        scripted_turn(game, seat, SCRIPTED[game.seats[seat].player])
    return game


def random_games(count: int, seats: int | None = None, players: tuple[str, ...] = ("random",)) -> Iterator[Game]:
    """Games at every moment somebody is about to act, with all sizes of table in turn."""
    for seed in range(count):
        game = new_game(seed, seed, seats or 7 + seed % 9, list(players), Rules(max_days=5))
        begin(game)
        while game.phase is not Phase.OVER:
            yield game
            asked = to_act(game)[0]
            scripted_turn(game, asked, SCRIPTED[game.seats[asked].player])


def random_reply(turn: Turn, rng: Random) -> str:
    tag = rng.choice(list(turn.legal))
    return reply(tag, argument_for(turn.legal[tag], rng))


def argument_for(slot: Slot, rng: Random) -> str:
    word = f"word{rng.randrange(1000)}"
    choices: dict[Form, Callable[[], str]] = {
        Form.EMPTY: lambda: "",
        Form.TEXT: lambda: word,
        Form.CHOICE: lambda: rng.choice(slot.options),
        Form.ADDRESSED: lambda: f"{rng.choice(slot.options)}: {word}",
    }
    return choices[slot.form]()


def play(environment: TownEnvironment, commits: int, seed: int = 0) -> list[tuple[str, str, float]]:
    """Commits random replies and tells turn, reply and reward of each. Some are malformed or illegal."""
    history = []
    while len(history) < commits:
        for turn in environment.next_batch():
            rng = Random(f"{seed}/{turn.id}")
            answer = rng.choice([random_reply(turn, rng)] * 6 + ["nonsense", reply("vote", "nobody"), reply(WAIT)])
            history.append((turn.id, answer, environment.commit(turn, answer).reward))
            if len(history) == commits:
                break
    return history
