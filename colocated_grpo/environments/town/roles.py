"""The roles of town as data: faction, abilities and traits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import partial
from typing import TypedDict, Unpack


class Faction(StrEnum):
    TOWN = "town"
    MAFIA = "mafia"
    NEUTRAL = "neutral"


class Aim(StrEnum):
    """Allowed targets of an ability."""

    NONE = "none"
    OTHER = "other"
    OUTSIDER = "outsider"
    """Any living player outside the mafia."""


class Priority(IntEnum):
    """Order of resolution within a night. A block stops only actions of a later priority."""

    PREPARE = 1
    BLOCK = 2
    MARK = 3
    PROTECT = 4
    ATTACK = 5
    INVESTIGATE = 6


class Power(IntEnum):
    """Strength of attacks and of defences. An attack kills if it is stronger than the victim's defence."""

    NONE = 0
    BASIC = 1
    STRONG = 2
    FINAL = 3


@dataclass(frozen=True, slots=True)
class Ability:
    """A night action."""

    priority: Priority
    tag: str
    aim: Aim = Aim.OTHER
    visits: bool = True
    """True if using the ability is a visit. Lookouts and trackers see visits; bodyguards and veterans on alert can
    fight visitors."""
    uses: int | None = None
    """Uses in a game. None: unlimited."""
    from_night: int = 1
    """First night on which the ability may be used."""
    attack: Power = Power.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One role. Example: ROLES["doctor"].faction is Faction.TOWN"""

    name: str
    faction: Faction
    card: str
    """Description in the prompt, in the second person."""
    abilities: tuple[Ability, ...] = ()
    day_power: str | None = None
    """Tag of the day action that only this role has."""
    defence: Power = Power.NONE
    suspicious: bool = False
    """True if a sheriff's investigation returns "suspicious" without a framer's help."""
    hostile: bool = False
    """True if the town cannot win while a seat with this role is alive."""
    unique: bool = False
    """True if the role is dealt at most once."""
    unblockable: bool = False

    def ability(self, tag: str) -> Ability | None:
        return next((ability for ability in self.abilities if ability.tag == tag), None)


class _Traits(TypedDict, total=False):
    day_power: str
    defence: Power
    suspicious: bool
    hostile: bool
    unique: bool
    unblockable: bool


def _role(faction: Faction, name: str, card: str, *abilities: Ability, **traits: Unpack[_Traits]) -> Role:
    return Role(name=name, faction=faction, card=card, abilities=abilities, **traits)


def _mafia(name: str, card: str, *abilities: Ability, **traits: Unpack[_Traits]) -> Role:
    traits.setdefault("suspicious", True)
    traits["hostile"] = True
    return _role(Faction.MAFIA, name, card, *abilities, **traits)


_town, _neutral = partial(_role, Faction.TOWN), partial(_role, Faction.NEUTRAL)
_investigate = partial(Ability, Priority.INVESTIGATE)
_mark = partial(Ability, Priority.MARK)
_protect = partial(Ability, Priority.PROTECT)
_prepare = partial(Ability, Priority.PREPARE, aim=Aim.NONE, visits=False)
_block = partial(Ability, Priority.BLOCK, "distract")
_kill = partial(Ability, Priority.ATTACK, attack=Power.BASIC)

_TABLE = (
    _town("citizen", "You have no special skill: your voice and your vote are all you bring."),
    _town(
        "sheriff",
        "Each night you look into one person and learn whether they seem suspicious.",
        _investigate("investigate"),
    ),
    _town("lookout", "Each night you watch one person's door and learn who called on them.", _investigate("watch")),
    _town("tracker", "Each night you follow one person and learn whom they called on.", _investigate("track")),
    _town("doctor", "Each night you nurse one other person, who survives ordinary attacks.", _protect("protect")),
    _town(
        "bodyguard",
        "Each night you stand before one other person's door: should a killer call, you two fight to the death.",
        _protect("guard"),
    ),
    _town(
        "barkeep", "Each night you keep one person at your bar, so that they do nothing.", _block(), unblockable=True
    ),
    _town(
        "vigilante",
        "You own two bullets and may use one a night, from the second night on.",
        _kill("shoot", uses=2, from_night=2),
    ),
    _town(
        "veteran",
        "On three nights you may lie in wait and shoot everybody who calls on you.",
        _prepare("alert", uses=3),
        unique=True,
        unblockable=True,
    ),
    _town(
        "jailor",
        "Before each night you may lock one person up: they can do nothing, nobody reaches them, you two can talk, "
        "and three times a game you may put the prisoner to death.",
        _kill("execute", aim=Aim.NONE, uses=3, visits=False, attack=Power.FINAL),
        day_power="jail",
        unique=True,
        unblockable=True,
    ),
    _town(
        "mayor",
        "By day you may show your chain of office; from then on each of your votes counts three times.",
        day_power="reveal",
        unique=True,
    ),
    _mafia(
        "godfather",
        "You name the mafia's victim each night. Ordinary attacks do not kill you and a sheriff finds nothing on you.",
        _kill("kill", aim=Aim.OUTSIDER),
        suspicious=False,
        defence=Power.BASIC,
        unique=True,
    ),
    _mafia(
        "mafioso",
        "You carry out the godfather's order each night; without one, the victim is yours to choose.",
        _kill("kill", aim=Aim.OUTSIDER),
        unique=True,
    ),
    _mafia(
        "charmer",
        "Each night you keep one person busy, so that they do nothing.",
        _block(aim=Aim.OUTSIDER),
        unblockable=True,
    ),
    _mafia(
        "framer",
        "Each night you plant evidence: a sheriff will find that person suspicious.",
        _mark("frame", aim=Aim.OUTSIDER),
    ),
    _mafia("informer", "Each night you learn one person's exact role.", _investigate("spy", aim=Aim.OUTSIDER)),
    _mafia(
        "cleaner",
        "On three nights you may call on somebody; should they die that night, nobody learns their role or their will.",
        _mark("clean", aim=Aim.OUTSIDER, uses=3),
    ),
    _mafia(
        "silencer",
        "Each night you threaten one person, who cannot speak or whisper on the following day.",
        _mark("silence", aim=Aim.OUTSIDER),
    ),
    _neutral("jester", "You win if the town puts you to death by vote."),
    _neutral(
        "executioner",
        "You win if the town hangs your mark. Should your mark die otherwise, you become a jester.",
    ),
    _neutral(
        "survivor",
        "You win if you are alive at the end, whoever else wins. On four nights you may wear a vest.",
        _prepare("vest", uses=4),
    ),
    _neutral(
        "slayer",
        "You kill one person a night and win when nobody is left to stop you. Ordinary attacks do not kill you.",
        _kill("kill"),
        defence=Power.BASIC,
        suspicious=True,
        hostile=True,
        unique=True,
    ),
    _neutral(
        "arsonist",
        "Each night you either soak one person's house in oil or set fire to every soaked one, which nobody survives. "
        "You win when nobody is left to stop you. Ordinary attacks do not kill you.",
        _mark("douse"),
        _kill("ignite", aim=Aim.NONE, visits=False, attack=Power.FINAL),
        defence=Power.BASIC,
        hostile=True,
        unique=True,
    ),
)

ROLES = {role.name: role for role in _TABLE}
NIGHT_TAGS = frozenset(ability.tag for role in _TABLE for ability in role.abilities)
DAY_POWERS = frozenset(role.day_power for role in _TABLE if role.day_power)
