"""Deaths, and who has won."""

from __future__ import annotations

from colocated_grpo.environments.town.roles import Faction
from colocated_grpo.environments.town.state import DRAW, NOBODY, Game, Phase

UNKNOWN = "unknown"
"""Read out for the role of somebody whose body was cleaned."""
LAST_PAIR = 2


def bury(game: Game, seat: int, kind: str, *, hidden: bool = False) -> None:
    """The seat dies; its role is read out unless it was hidden. kind: 'killed' or 'hanged'."""
    victim = game.seats[seat]
    victim.alive, victim.hidden_end = False, hidden
    game.announce(kind, actor=seat, text=UNKNOWN if hidden else victim.role_name)
    for hater in game.holders("executioner"):
        if game.seats[hater].mark == seat:
            _mark_died(game, hater, hanged=kind == "hanged")
    if kind == "hanged" and victim.role_name == "jester":
        victim.goal_reached = True


def _mark_died(game: Game, hater: int, *, hanged: bool) -> None:
    executioner = game.seats[hater]
    if hanged:
        executioner.goal_reached = True
        game.tell([hater], "note", text="Your mark was hanged: you have won, whatever happens now.")
    else:
        executioner.become("jester")
        executioner.mark = NOBODY
        game.tell([hater], "note", text="Your mark is dead without a vote: you are a jester now.")


def winner(game: Game) -> str | None:
    """The faction that has won by who is left; DRAW when nobody is; None while it is open."""
    living = game.living()
    mafia = len(game.mafia())
    killers = [i for i in living if game.seats[i].role.hostile and game.seats[i].role.faction is Faction.NEUTRAL]
    if not living:
        return DRAW
    if killers:
        # One against one, nobody can stop the killer by vote; a mafioso still can by night.
        return Faction.NEUTRAL if not mafia and len(living) <= LAST_PAIR else None
    if mafia:
        return Faction.MAFIA if 2 * mafia >= len(living) else None
    town = any(game.seats[index].role.faction is Faction.TOWN for index in living)
    return Faction.TOWN if town else DRAW


def close_if_won(game: Game) -> bool:
    game.winner = winner(game)
    return game.winner is not None


def declare(game: Game) -> None:
    """The last line of a game."""
    game.announce("over", text=game.winner or DRAW)


def result(game: Game, seat: int) -> float:
    """+1 the seat won, -1 it lost, 0 the game was a draw and nothing else decided it."""
    holder = game.seats[seat]
    if game.phase is not Phase.OVER:
        raise ValueError(f"game {game.number}: no result before it is over")
    if holder.goal_reached:
        return 1.0
    if holder.role_name in ("jester", "executioner"):
        return -1.0
    if holder.role_name == "survivor":
        return 1.0 if holder.alive else -1.0
    if game.winner == DRAW:
        return 0.0
    if holder.role.faction is Faction.NEUTRAL:
        return 1.0 if game.winner == Faction.NEUTRAL and holder.alive else -1.0
    return 1.0 if holder.role.faction == game.winner else -1.0
