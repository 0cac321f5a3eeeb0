"""One night: blocks first, then marks, protection, attacks and at last what was seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from colocated_grpo.environments.town.endings import bury
from colocated_grpo.environments.town.roles import Ability, Aim, Faction, Power, Priority
from colocated_grpo.environments.town.state import NOBODY, Game


class Deed:
    """An ability pointed at somebody tonight."""

    __slots__ = ("ability", "seat", "target")

    def __init__(self, seat: int, ability: Ability, target: int) -> None:
        self.seat, self.ability, self.target = seat, ability, target

    @property
    def order(self) -> tuple[int, int]:
        return self.ability.priority, self.seat


class Night:
    """What is known of the night while it is worked out."""

    def __init__(self, game: Game, deeds: list[Deed]) -> None:
        self.game = game
        self.deeds = sorted(deeds, key=lambda deed: deed.order)
        self.visits: list[tuple[int, int]] = []
        self.defence = {seat: game.seats[seat].role.defence for seat in game.living()}
        self.guards: dict[int, list[int]] = defaultdict(list)
        self.framed: set[int] = set()
        self.cleaned: set[int] = set()
        self.alert: set[int] = set()
        self.dead: set[int] = set()

    def walk(self) -> None:
        """Everybody who visits is on the way before the first shot: the dead have called on somebody too."""
        self.visits += [(deed.seat, deed.target) for deed in self.deeds if deed.ability.visits]

    def at_door(self, seat: int) -> list[int]:
        return [visitor for visitor, host in self.visits if host == seat]

    def raise_defence(self, seat: int, power: Power) -> None:
        self.defence[seat] = max(self.defence[seat], power)

    def attack(self, attacker: int, victim: int, power: Power, *, guardable: bool) -> None:
        if victim in self.dead:
            return
        if guardable and self.guards[victim]:
            guard = self.guards[victim].pop(0)
            self.game.tell([victim], "note", text="Somebody attacked you, and your bodyguard stood in the way.")
            self.attack(guard, attacker, Power.STRONG, guardable=False)
            self.attack(attacker, guard, Power.STRONG, guardable=False)
        elif power > self.defence[victim]:
            self.dead.add(victim)
        else:
            self.game.tell([victim], "note", text="Somebody attacked you, and you lived.")
            self.game.tell([attacker], "note", text="Your victim survived the attack.")


def resolve_night(game: Game) -> None:
    """Carries out the choices of the night and buries its dead."""
    night = Night(game, _free_deeds(game))
    _mafia_order(night)
    _run(night, Priority.PREPARE, Priority.BLOCK)
    night.walk()
    _run(night, Priority.MARK, Priority.PROTECT)
    _ambush(night)
    _run(night, Priority.ATTACK, Priority.LOOK)
    for seat in night.dead:
        game.seats[seat].alive = False  # together: nobody lives to see a mark buried that died in the same night
    for seat in sorted(night.dead):
        bury(game, seat, "killed", hidden=seat in night.cleaned)


def _free_deeds(game: Game) -> list[Deed]:
    """The choices that jail does not undo; uses are spent by trying."""
    deeds = []
    for seat, (tag, argument) in sorted(game.choices.items()):
        ability = game.seats[seat].role.ability(tag)
        if ability is None:
            continue
        target = game.index(argument) if argument else _implied_target(game, seat, ability)
        game.record("action", actor=seat, target=target, text=tag)
        if ability.uses is not None:
            game.seats[seat].uses[tag] -= 1
        if ability.aim is not Aim.NOBODY and target == game.prisoner:
            game.tell([seat], "note", text=f"{game.seats[target].name} could not be reached: the jail was locked.")
        else:
            deeds.append(Deed(seat, ability, target))
    return deeds


def _implied_target(game: Game, seat: int, ability: Ability) -> int:
    return game.prisoner if ability.tag == "execute" else seat


def _mafia_order(night: Night) -> None:
    """The godfather names the victim, and a mafioso at liberty goes in the godfather's place."""
    game, boss = night.game, _lone_holder(night.game, "godfather")
    hand = _lone_holder(game, "mafioso")
    order = next((deed for deed in night.deeds if deed.seat == boss), None)
    if order is None or hand in (NOBODY, game.prisoner):
        return
    if any(deed.ability.priority is Priority.BLOCK and deed.target in (boss, hand) for deed in night.deeds):
        return  # Each acts on a choice of their own, and the block then stops the one it was meant for.
    night.deeds = [deed for deed in night.deeds if deed.seat not in (boss, hand)]
    night.deeds.append(Deed(hand, order.ability, order.target))
    night.deeds.sort(key=lambda deed: deed.order)


def _lone_holder(game: Game, role_name: str) -> int:
    holders = game.holders(role_name)
    return holders[0] if holders else NOBODY


def _run(night: Night, first: Priority, last: Priority) -> None:
    """All deeds from one priority to another, in order."""
    for deed in [deed for deed in night.deeds if first <= deed.ability.priority <= last]:
        # A block among them may have struck this one out.
        if deed in night.deeds:
            _HANDLERS[deed.ability.tag](night, deed)


def _ambush(night: Night) -> None:
    """Whoever calls on somebody lying in wait is shot at, friend or foe."""
    for host in sorted(night.alert):
        for visitor in night.at_door(host):
            night.attack(host, visitor, Power.STRONG, guardable=False)


def _prepare(night: Night, deed: Deed) -> None:
    night.raise_defence(deed.seat, Power.BASIC)
    if deed.ability.tag == "alert":
        night.alert.add(deed.seat)


def _distract(night: Night, deed: Deed) -> None:
    target = night.game.seats[deed.target]
    if target.role.unblockable:
        night.game.tell([deed.target], "note", text="Somebody tried to distract you in vain.")
        return
    night.deeds = [other for other in night.deeds if other.seat != deed.target]
    night.game.tell([deed.target], "note", text="Somebody kept you busy all night: you did nothing.")


def _frame(night: Night, deed: Deed) -> None:
    night.framed.add(deed.target)


def _clean(night: Night, deed: Deed) -> None:
    night.cleaned.add(deed.target)


def _silence(night: Night, deed: Deed) -> None:
    night.game.seats[deed.target].muted = True
    night.game.tell([deed.target], "note", text="You were threatened: you cannot speak today.")


def _douse(night: Night, deed: Deed) -> None:
    night.game.seats[deed.target].doused = True


def _protect(night: Night, deed: Deed) -> None:
    night.raise_defence(deed.target, Power.STRONG)


def _guard(night: Night, deed: Deed) -> None:
    night.guards[deed.target].append(deed.seat)


def _strike(night: Night, deed: Deed) -> None:
    night.attack(deed.seat, deed.target, deed.ability.attack, guardable=deed.ability.visits)


def _ignite(night: Night, deed: Deed) -> None:
    for seat in night.game.living():
        if night.game.seats[seat].doused and seat != night.game.prisoner:
            night.attack(deed.seat, seat, deed.ability.attack, guardable=False)


def _investigate(night: Night, deed: Deed) -> None:
    bad = night.game.seats[deed.target].role.suspicious or deed.target in night.framed
    _report(night, deed, "suspicious" if bad else "not suspicious")


def _spy(night: Night, deed: Deed) -> None:
    _report(night, deed, night.game.seats[deed.target].role_name)


def _watch(night: Night, deed: Deed) -> None:
    callers = night.game.names(seat for seat in night.at_door(deed.target) if seat != deed.seat)
    _report(night, deed, "visited by " + (", ".join(callers) or "nobody"))


def _track(night: Night, deed: Deed) -> None:
    hosts = night.game.names(host for visitor, host in night.visits if visitor == deed.target)
    _report(night, deed, "called on " + (", ".join(hosts) or "nobody"))


def _report(night: Night, deed: Deed, finding: str) -> None:
    """The mafia shares what its informer learns."""
    game = night.game
    shared = game.seats[deed.seat].role.faction is Faction.MAFIA
    game.tell(game.mafia() if shared else [deed.seat], "result", deed.seat, deed.target, finding)


_HANDLERS: dict[str, Callable[[Night, Deed], None]] = {
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
