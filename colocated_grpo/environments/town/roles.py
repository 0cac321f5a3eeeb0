"""The roles of town as data: faction, abilities and traits."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Faction(StrEnum):
    TOWN = "town"
    MAFIA = "mafia"
    NEUTRAL = "neutral"


class Aim(StrEnum):
    """Allowed targets of an ability."""

    NONE = "none"
    """The prisoner."""
    OTHER = "other"
    OUTSIDER = "outsider"
    """Any living player outside the mafia."""


class Priority(IntEnum):
    """Order of resolution within a night."""

    PROTECT = 1
    ATTACK = 2
    INVESTIGATE = 3


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
    uses: int | None = None
    """Uses in a game. None: unlimited."""
    from_night: int = 1
    """First night on which the ability may be used."""
    attack: Power = Power.NONE


@dataclass(frozen=True, slots=True)
class Role:
    """One role. Example: ROLES["doctor"].faction is Faction.TOWN"""

    name: str
    faction: Faction
    ability: Ability | None = None
    day_power: str | None = None
    """Tag of the day action that only this role has."""
    defence: Power = Power.NONE
    suspicious: bool = False
    """True if a sheriff's investigation returns "suspicious"."""
    hostile: bool = False
    """True if the town cannot win while a seat with this role is alive."""
    unique: bool = False
    """True if the role is dealt at most once."""

    @property
    def card(self) -> str:
        """Description in the prompt, in the second person."""
        return _CARDS[self.name]


_TOWN, _MAFIA, _NEUTRAL = Faction
_KILL = Ability(Priority.ATTACK, "kill", Aim.OUTSIDER, attack=Power.BASIC)
_SLAY = Ability(Priority.ATTACK, "kill", attack=Power.BASIC)
_EXECUTE = Ability(Priority.ATTACK, "execute", Aim.NONE, uses=3, attack=Power.FINAL)
_SPY = Ability(Priority.INVESTIGATE, "spy", Aim.OUTSIDER)

_TABLE = (
    Role("citizen", _TOWN),
    Role("sheriff", _TOWN, Ability(Priority.INVESTIGATE, "investigate")),
    Role("lookout", _TOWN, Ability(Priority.INVESTIGATE, "watch")),
    Role("doctor", _TOWN, Ability(Priority.PROTECT, "protect")),
    Role("vigilante", _TOWN, Ability(Priority.ATTACK, "shoot", uses=2, from_night=2, attack=Power.BASIC)),
    Role("jailor", _TOWN, _EXECUTE, day_power="jail", unique=True),
    Role("mayor", _TOWN, day_power="reveal", unique=True),
    Role("godfather", _MAFIA, _KILL, defence=Power.BASIC, hostile=True, unique=True),
    Role("mafioso", _MAFIA, _KILL, suspicious=True, hostile=True, unique=True),
    Role("informer", _MAFIA, _SPY, suspicious=True, hostile=True),
    Role("jester", _NEUTRAL),
    Role("slayer", _NEUTRAL, _SLAY, defence=Power.BASIC, suspicious=True, hostile=True, unique=True),
)
_CARDS = {
    "citizen": "You have no special skill: your voice and your vote are all you bring.",
    "sheriff": "Each night you look into one person and learn whether they seem suspicious.",
    "lookout": "Each night you watch one person's door and learn who called on them.",
    "doctor": "Each night you nurse one other person, who survives ordinary attacks.",
    "vigilante": "You own two bullets and may use one a night, from the second night on.",
    "jailor": "Before each night you may lock one person up: they can do nothing, nobody reaches them, you two can "
    "talk, and three times a game you may put the prisoner to death.",
    "mayor": "By day you may show your chain of office; from then on each of your votes counts three times.",
    "godfather": "You name the mafia's victim each night. Ordinary attacks do not kill you and a sheriff finds "
    "nothing on you.",
    "mafioso": "You carry out the godfather's order each night; without one, the victim is yours to choose.",
    "informer": "Each night you learn one person's exact role.",
    "jester": "You win if the town puts you to death by vote.",
    "slayer": "You kill one person a night and win when nobody is left to stop you. Ordinary attacks do not kill you.",
}

ROLES = {role.name: role for role in _TABLE}
NIGHT_TAGS = frozenset(role.ability.tag for role in _TABLE if role.ability)
DAY_POWERS = frozenset(role.day_power for role in _TABLE if role.day_power)
