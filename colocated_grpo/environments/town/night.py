"""Nights, deaths and the end of a game."""

from dataclasses import dataclass

from colocated_grpo.environments.town.roles import Ability, Aim, Faction, Power, Priority
from colocated_grpo.environments.town.state import DRAW, NO_SEAT, Game, Phase

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
    if holder.role_name == "jester":
        return -1.0
    if game.winner == DRAW:
        return 0.0
    if holder.role.faction is Faction.NEUTRAL:
        return 1.0 if game.winner == Faction.NEUTRAL and holder.alive else -1.0
    return 1.0 if holder.role.faction == game.winner else -1.0


@dataclass(frozen=True, slots=True)
class NightAction:
    """An ability that a seat uses tonight."""

    seat: int
    ability: Ability
    target: int

    @property
    def order(self) -> tuple[int, int]:
        return self.ability.priority, self.seat


def resolve_night(game: Game) -> None:
    """Apply the choices of the night to the game and eliminate the victims."""
    actions = sorted(_delegate_kill(game, _unjailed_actions(game)), key=lambda action: action.order)
    defence = {seat: game.seats[seat].role.defence for seat in game.living()}
    dead: set[int] = set()
    for action in actions:
        if action.ability.priority is Priority.PROTECT:
            defence[action.target] = max(defence[action.target], Power.STRONG)
        elif action.ability.priority is Priority.INVESTIGATE:
            _report(game, action, _finding(game, action, actions))
        elif action.ability.attack > defence[action.target]:
            dead.add(action.target)
        else:
            game.notify([action.target], "note", text="Somebody attacked you, and you lived.")
            game.notify([action.seat], "note", text="Your victim survived the attack.")
    for seat in sorted(dead):
        eliminate(game, seat, "killed")


def _unjailed_actions(game: Game) -> list[NightAction]:
    """Return the chosen actions, without those aimed at the prisoner.

    Actions aimed at the prisoner fail, but still spend a use.
    """
    actions = []
    for seat, (tag, argument) in sorted(game.choices.items()):
        ability = game.seats[seat].role.ability
        if ability is None:
            continue
        target = game.index(argument) if argument else game.prisoner  # an execution
        game.record("action", actor=seat, target=target, text=tag)
        if ability.uses is not None:
            game.seats[seat].uses[tag] -= 1
        if ability.aim is not Aim.NONE and target == game.prisoner:
            game.notify([seat], "note", text=f"{game.seats[target].name} could not be reached: the jail was locked.")
        else:
            actions.append(NightAction(seat, ability, target))
    return actions


def _delegate_kill(game: Game, actions: list[NightAction]) -> list[NightAction]:
    """Let the mafioso carry out the godfather's kill, in place of both their actions, unless the mafioso is jailed."""
    godfather, mafioso = _first_living(game, "godfather"), _first_living(game, "mafioso")
    order = next((action for action in actions if action.seat == godfather), None)
    if order is None or mafioso in (NO_SEAT, game.prisoner):
        return actions
    others = [action for action in actions if action.seat not in (godfather, mafioso)]
    return [*others, NightAction(mafioso, order.ability, order.target)]


def _first_living(game: Game, role_name: str) -> int:
    """Return the first living seat with the role, or NO_SEAT."""
    return next(iter(game.living_with_role(role_name)), NO_SEAT)


def _finding(game: Game, action: NightAction, actions: list[NightAction]) -> str:
    """Return what an investigation finds. Lookouts see all visits of the night, those of its victims included."""
    role = game.seats[action.target].role
    if action.ability.tag == "spy":
        return role.name
    if action.ability.tag == "investigate":
        return "suspicious" if role.suspicious else "not suspicious"
    callers = [one.seat for one in actions if one.ability.visits and one.target == action.target]
    return "visited by " + (", ".join(game.names(seat for seat in callers if seat != action.seat)) or "nobody")


def _report(game: Game, action: NightAction, finding: str) -> None:
    """Send the finding to the investigating seat, or to the whole mafia if that seat is a mafia member."""
    in_mafia = game.seats[action.seat].role.faction is Faction.MAFIA
    game.notify(game.mafia() if in_mafia else [action.seat], "result", action.seat, action.target, finding)
