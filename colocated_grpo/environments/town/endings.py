"""Deaths, the winning side, and the result of each seat."""

from __future__ import annotations

from colocated_grpo.environments.town.roles import Faction
from colocated_grpo.environments.town.state import DRAW, NO_SEAT, Game, Phase

UNKNOWN = "unknown"
"""Announced in place of the role of a victim whose body was cleaned."""
_LAST_PAIR = 2


def eliminate(game: Game, seat: int, kind: str, *, hidden: bool = False) -> None:
    """Remove a seat from the living and announce its role, or UNKNOWN if `hidden`.

    kind: 'killed' or 'hanged'. An executioner whose mark was this seat reaches its goal or becomes a jester.
    """
    victim = game.seats[seat]
    victim.alive, victim.hidden_end = False, hidden
    game.announce(kind, actor=seat, text=UNKNOWN if hidden else victim.role_name)
    for executioner in game.living_with_role("executioner"):
        if game.seats[executioner].mark == seat:
            _settle_mark(game, executioner, hanged=kind == "hanged")
    if kind == "hanged" and victim.role_name == "jester":
        victim.goal_reached = True


def _settle_mark(game: Game, seat: int, *, hanged: bool) -> None:
    executioner = game.seats[seat]
    if hanged:
        executioner.goal_reached = True
        game.notify([seat], "note", text="Your mark was hanged: you have won, whatever happens now.")
    else:
        executioner.become("jester")
        executioner.mark = NO_SEAT
        game.notify([seat], "note", text="Your mark is dead without a vote: you are a jester now.")


def winning_side(game: Game) -> str | None:
    """Return the winning faction, DRAW if at most harmless neutrals are alive, or None while the game is open."""
    living = game.living()
    mafia = len(game.mafia())
    killers = [i for i in living if game.seats[i].role.hostile and game.seats[i].role.faction is Faction.NEUTRAL]
    if not living:
        return DRAW
    if killers:
        # One on one, a vote cannot stop the killer. A mafia member still can, at night.
        return Faction.NEUTRAL if not mafia and len(living) <= _LAST_PAIR else None
    if mafia:
        return Faction.MAFIA if 2 * mafia >= len(living) else None
    town = any(game.seats[index].role.faction is Faction.TOWN for index in living)
    return Faction.TOWN if town else DRAW


def settle_winner(game: Game) -> bool:
    """Store the winning side, if any; return whether the game has ended."""
    game.winner = winning_side(game)
    return game.winner is not None


def seat_result(game: Game, seat: int) -> float:
    """Return +1 if the seat won, -1 if it lost, 0 for a draw. Raises ValueError before the game is over."""
    holder = game.seats[seat]
    if game.phase is not Phase.OVER:
        raise ValueError(f"game {game.number}: it is not over, so no seat has a result")
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
