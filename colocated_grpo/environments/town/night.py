"""Nights, deaths and the end of a game."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from colocated_grpo.environments.town.roles import Ability, Aim, Faction, Power, Priority
from colocated_grpo.environments.town.state import DRAW, NO_SEAT, Game, Phase

UNKNOWN = "unknown"
"""Announced in place of the role of a victim whose body was cleaned."""
_LAST_PAIR = 2


def eliminate(game: Game, seat: int, kind: str, *, hidden: bool = False) -> None:
    """Remove a seat from the living and announce its role, or UNKNOWN if `hidden`.

    kind: 'killed' or 'hanged'. If the seat was an executioner's mark, a hanging fulfils the executioner's goal, and any
    other death makes the executioner a jester.
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
    if holder.role_name in ("jester", "executioner"):
        return -1.0
    if holder.role_name == "survivor":
        return 1.0 if holder.alive else -1.0
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


class Night:
    """State of one night during its resolution.

    `actions`: the actions that are not blocked so far, in order of resolution.
    """

    def __init__(self, game: Game, actions: list[NightAction]) -> None:
        self.game = game
        self.actions = sorted(actions, key=lambda action: action.order)
        self.visits: list[tuple[int, int]] = []
        """(visitor, host) pairs."""
        self.defence = {seat: game.seats[seat].role.defence for seat in game.living()}
        self.guards: dict[int, list[int]] = defaultdict(list)
        """Bodyguards by the seat that they guard."""
        self.framed: set[int] = set()
        self.cleaned: set[int] = set()
        self.alert: set[int] = set()
        self.dead: set[int] = set()

    def record_visits(self) -> None:
        """Record all visits before the first attack, so that a victim's own visit is seen too."""
        self.visits += [(action.seat, action.target) for action in self.actions if action.ability.visits]

    def visitors_of(self, seat: int) -> list[int]:
        return [visitor for visitor, host in self.visits if host == seat]

    def raise_defence(self, seat: int, power: Power) -> None:
        self.defence[seat] = max(self.defence[seat], power)

    def attack(self, attacker: int, victim: int, power: Power, *, guardable: bool) -> None:
        """Kill the victim if the attack is stronger than the victim's defence.

        If `guardable`, a bodyguard takes the victim's place. Bodyguard and attacker then attack each other.
        """
        if victim in self.dead:
            return
        if guardable and self.guards[victim]:
            guard = self.guards[victim].pop(0)
            self.game.notify([victim], "note", text="Somebody attacked you, and your bodyguard stood in the way.")
            self.attack(guard, attacker, Power.STRONG, guardable=False)
            self.attack(attacker, guard, Power.STRONG, guardable=False)
        elif power > self.defence[victim]:
            self.dead.add(victim)
        else:
            self.game.notify([victim], "note", text="Somebody attacked you, and you lived.")
            self.game.notify([attacker], "note", text="Your victim survived the attack.")


def resolve_night(game: Game) -> None:
    """Apply the choices of the night to the game and eliminate the victims."""
    night = Night(game, _unjailed_actions(game))
    _delegate_kill(night)
    _resolve(night, Priority.PREPARE, Priority.BLOCK)
    night.record_visits()
    _resolve(night, Priority.MARK, Priority.PROTECT)
    _ambush(night)
    _resolve(night, Priority.ATTACK, Priority.INVESTIGATE)
    # All victims die before the first elimination: an executioner who dies with its mark must not become a jester.
    for seat in night.dead:
        game.seats[seat].alive = False
    for seat in sorted(night.dead):
        eliminate(game, seat, "killed", hidden=seat in night.cleaned)


def _unjailed_actions(game: Game) -> list[NightAction]:
    """Return the chosen actions, without those aimed at the prisoner.

    Actions aimed at the prisoner fail, but still spend a use.
    """
    actions = []
    for seat, (tag, argument) in sorted(game.choices.items()):
        ability = game.seats[seat].role.ability(tag)
        if ability is None:
            continue
        target = game.index(argument) if argument else _implied_target(game, seat, ability)
        game.record("action", actor=seat, target=target, text=tag)
        if ability.uses is not None:
            game.seats[seat].uses[tag] -= 1
        if ability.aim is not Aim.NONE and target == game.prisoner:
            game.notify([seat], "note", text=f"{game.seats[target].name} could not be reached: the jail was locked.")
        else:
            actions.append(NightAction(seat, ability, target))
    return actions


def _implied_target(game: Game, seat: int, ability: Ability) -> int:
    return game.prisoner if ability.tag == "execute" else seat


def _delegate_kill(night: Night) -> None:
    """Let the mafioso carry out the godfather's kill, unless godfather or mafioso is jailed or blocked.

    The mafioso's kill replaces the actions of godfather and mafioso.
    """
    game = night.game
    godfather, mafioso = _first_living(game, "godfather"), _first_living(game, "mafioso")
    order = next((action for action in night.actions if action.seat == godfather), None)
    if order is None or mafioso in (NO_SEAT, game.prisoner):
        return
    blocked = {action.target for action in night.actions if action.ability.priority is Priority.BLOCK}
    if blocked & {godfather, mafioso}:
        return  # Godfather and mafioso act on their own choices, so that the block stops only its target.
    night.actions = [action for action in night.actions if action.seat not in (godfather, mafioso)]
    night.actions.append(NightAction(mafioso, order.ability, order.target))
    night.actions.sort(key=lambda action: action.order)


def _first_living(game: Game, role_name: str) -> int:
    """Return the first living seat with the role, or NO_SEAT."""
    return next(iter(game.living_with_role(role_name)), NO_SEAT)


def _resolve(night: Night, first: Priority, last: Priority) -> None:
    """Apply the actions of priorities `first` to `last`, in order."""
    for action in [action for action in night.actions if first <= action.ability.priority <= last]:
        # An earlier block may have removed this action.
        if action in night.actions:
            _HANDLERS[action.ability.tag](night, action)


def _ambush(night: Night) -> None:
    """Let every veteran on alert attack all visitors of the veteran, regardless of side."""
    for host in sorted(night.alert):
        for visitor in night.visitors_of(host):
            night.attack(host, visitor, Power.STRONG, guardable=False)


def _prepare(night: Night, action: NightAction) -> None:
    night.raise_defence(action.seat, Power.BASIC)
    if action.ability.tag == "alert":
        night.alert.add(action.seat)


def _distract(night: Night, action: NightAction) -> None:
    target = night.game.seats[action.target]
    if target.role.unblockable:
        night.game.notify([action.target], "note", text="Somebody tried to distract you in vain.")
        return
    night.actions = [other for other in night.actions if other.seat != action.target]
    night.game.notify([action.target], "note", text="Somebody kept you busy all night: you did nothing.")


def _frame(night: Night, action: NightAction) -> None:
    night.framed.add(action.target)


def _clean(night: Night, action: NightAction) -> None:
    night.cleaned.add(action.target)


def _silence(night: Night, action: NightAction) -> None:
    night.game.seats[action.target].muted = True
    night.game.notify([action.target], "note", text="You were threatened: you cannot speak today.")


def _douse(night: Night, action: NightAction) -> None:
    night.game.seats[action.target].doused = True


def _protect(night: Night, action: NightAction) -> None:
    night.raise_defence(action.target, Power.STRONG)


def _guard(night: Night, action: NightAction) -> None:
    night.guards[action.target].append(action.seat)


def _strike(night: Night, action: NightAction) -> None:
    night.attack(action.seat, action.target, action.ability.attack, guardable=action.ability.visits)


def _ignite(night: Night, action: NightAction) -> None:
    for seat in night.game.living():
        if night.game.seats[seat].doused and seat != night.game.prisoner:
            night.attack(action.seat, seat, action.ability.attack, guardable=False)


def _investigate(night: Night, action: NightAction) -> None:
    bad = night.game.seats[action.target].role.suspicious or action.target in night.framed
    _report(night, action, "suspicious" if bad else "not suspicious")


def _spy(night: Night, action: NightAction) -> None:
    _report(night, action, night.game.seats[action.target].role_name)


def _watch(night: Night, action: NightAction) -> None:
    callers = night.game.names(seat for seat in night.visitors_of(action.target) if seat != action.seat)
    _report(night, action, "visited by " + (", ".join(callers) or "nobody"))


def _track(night: Night, action: NightAction) -> None:
    hosts = night.game.names(host for visitor, host in night.visits if visitor == action.target)
    _report(night, action, "called on " + (", ".join(hosts) or "nobody"))


def _report(night: Night, action: NightAction, finding: str) -> None:
    """Send the finding to the investigating seat, or to the whole mafia if that seat is a mafia member."""
    game = night.game
    in_mafia = game.seats[action.seat].role.faction is Faction.MAFIA
    game.notify(game.mafia() if in_mafia else [action.seat], "result", action.seat, action.target, finding)


_HANDLERS: dict[str, Callable[[Night, NightAction], None]] = {
    "alert": _prepare,
    "vest": _prepare,
    "distract": _distract,
    "frame": _frame,
    "clean": _clean,
    "silence": _silence,
    "douse": _douse,
    "protect": _protect,
    "guard": _guard,
    "kill": _strike,
    "shoot": _strike,
    "execute": _strike,
    "ignite": _ignite,
    "investigate": _investigate,
    "spy": _spy,
    "watch": _watch,
    "track": _track,
}
