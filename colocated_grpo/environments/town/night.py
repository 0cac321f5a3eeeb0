"""Nights, deaths and the end of a game."""

from typing import NamedTuple

from colocated_grpo.environments.town.roles import Ability, Aim, Faction, Power, Priority
from colocated_grpo.environments.town.state import DRAW, Game, Phase

_LAST_PAIR = 2


def eliminate(game: Game, seat: int, kind: str) -> None:
    """Remove a seat from the living and announce its role. kind: 'killed' or 'hanged'."""
    victim = game.seats[seat]
    victim.alive = False
    game.announce(kind, actor=seat, text=victim.role_name)
    if kind == "hanged" and victim.role_name == "jester":
        victim.goal_reached = True


def winning_side(game: Game) -> str | None:
    """Return the winning faction, DRAW if at most harmless neutrals are alive, or None while the game is open."""
    living = game.living()
    mafia = len(game.mafia())
    killers = [i for i in living if game.seats[i].role.hostile and game.seats[i].role.faction is Faction.NEUTRAL]
    if not living:
        return DRAW
    if killers:
        # With two players left, a vote cannot stop the killer. A mafia member still can, at night.
        return Faction.NEUTRAL if not mafia and len(living) <= _LAST_PAIR else None
    if mafia:
        return Faction.MAFIA if 2 * mafia >= len(living) else None
    town = any(game.seats[index].role.faction is Faction.TOWN for index in living)
    return Faction.TOWN if town else DRAW


def seat_result(game: Game, seat: int) -> float:
    """Return +1 if the seat won, -1 if it lost, 0 for a draw. Raises ValueError before the game is over."""
    holder = game.seats[seat]
    if game.phase is not Phase.OVER:
        raise ValueError(f"game {game.number}: it is not over, so no seat has a result")
    if holder.goal_reached:
        return 1.0
    if holder.role_name == "jester":
        return -1.0
    if game.winner == DRAW:
        return 0.0
    if holder.role.faction is Faction.NEUTRAL:
        return 1.0 if game.winner == Faction.NEUTRAL and holder.alive else -1.0
    return 1.0 if holder.role.faction == game.winner else -1.0


class NightAction(NamedTuple):
    """An ability that a seat uses tonight."""

    seat: int
    ability: Ability
    target: int


def resolve_night(game: Game) -> None:
    """Apply the choices of the night to the game and eliminate the victims."""
    actions = _delegate_kill(game, _unjailed_actions(game))
    actions.sort(key=lambda action: (action.ability.priority, action.seat))
    defence = {seat: game.seats[seat].role.defence for seat in game.living()}
    dead: set[int] = set()
    for action in actions:
        if action.ability.priority is Priority.PROTECT:
            defence[action.target] = max(defence[action.target], Power.STRONG)
        elif action.ability.priority is Priority.INVESTIGATE:
            # The whole mafia learns what one of its members finds.
            in_mafia = game.seats[action.seat].role.faction is Faction.MAFIA
            audience, finding = game.mafia() if in_mafia else [action.seat], _finding(game, action, actions)
            game.announce("result", action.seat, action.target, finding, audience=audience)
        elif action.ability.attack > defence[action.target]:
            dead.add(action.target)
        else:
            game.announce("note", text="Somebody attacked you, and you lived.", audience=[action.target])
            game.announce("note", text="Your victim survived the attack.", audience=[action.seat])
    for seat in sorted(dead):
        eliminate(game, seat, "killed")


def _unjailed_actions(game: Game) -> list[NightAction]:
    """Return the chosen actions, without those aimed at the prisoner, which fail but still spend a use."""
    actions = []
    for seat, (tag, argument) in sorted(game.choices.items()):
        ability = game.seats[seat].role.ability
        if ability is None:
            continue
        target = game.index(argument) if argument else game.prisoner  # an execution
        game.announce("action", actor=seat, target=target, text=tag, audience=())
        if ability.uses is not None:
            game.seats[seat].uses[tag] -= 1
        if ability.aim is not Aim.NONE and target == game.prisoner:
            text = f"{game.seats[target].name} could not be reached: the jail was locked."
            game.announce("note", text=text, audience=[seat])
        else:
            actions.append(NightAction(seat, ability, target))
    return actions


def _delegate_kill(game: Game, actions: list[NightAction]) -> list[NightAction]:
    """Let the mafioso carry out the godfather's kill, in place of both their actions, unless the mafioso is jailed."""
    godfather, mafioso = game.living_with_role("godfather"), game.living_with_role("mafioso")
    order = next((action for action in actions if action.seat in godfather), None)
    if order is None or not mafioso or mafioso[0] == game.prisoner:
        return actions
    others = [action for action in actions if action.seat not in godfather + mafioso]
    return [*others, order._replace(seat=mafioso[0])]


def _finding(game: Game, action: NightAction, actions: list[NightAction]) -> str:
    """Return what an investigation finds. Lookouts see all visits of the night, those of its victims included."""
    role = game.seats[action.target].role
    if action.ability.tag == "spy":
        return role.name
    if action.ability.tag == "investigate":
        return "suspicious" if role.suspicious else "not suspicious"
    # An execution is no visit.
    callers = [one.seat for one in actions if one.ability.aim is not Aim.NONE and one.target == action.target]
    return "visited by " + (", ".join(game.names(seat for seat in callers if seat != action.seat)) or "nobody")
