"""Scripted seats at play: one turn, and whole games without anybody from outside."""

from __future__ import annotations

from random import Random

from colocated_grpo.environments.town.acting import carry_out
from colocated_grpo.environments.town.observations import observe
from colocated_grpo.environments.town.phases import begin, to_act
from colocated_grpo.environments.town.players import SCRIPTED, Player
from colocated_grpo.environments.town.state import Game, Phase, Rules, new_game
from colocated_grpo.environments.town.verdicts import judge


def scripted_turn(game: Game, seat: int, player: Player) -> None:
    completion = scripted_reply(game, seat, player)
    carry_out(game, seat, judge(game, seat, completion), completion)


def scripted_reply(game: Game, seat: int, player: Player) -> str:
    """The stream of chance hangs on the seat's own turn, so the order in which simultaneous seats act is no matter."""
    return player(observe(game, seat), Random(f"{game.seed}/{seat}/{game.seats[seat].acted}"))


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
