"""Who gets which role: a playable mix for 7 to 15 seats, or the user's own list."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from colocated_grpo.environments.town.roles import ROLES, Faction

FEWEST_SEATS, MOST_SEATS = 7, 15
NAMES = (
    "Ada", "Bram", "Cleo", "Dorn", "Elin", "Fitz", "Gwen", "Hugo",
    "Iris", "Jory", "Kaya", "Lars", "Mina", "Nils", "Opal",
)  # fmt: skip
"""Distinct from every role and tag, and none is part of another: a text that holds a name means that person."""

_LOOKERS = ("sheriff", "lookout", "tracker")
_PROTECTORS = ("doctor", "bodyguard")
_LEADERS = ("godfather", "mafioso")
_MOST_OF_ONE_ROLE = 2


def faction_sizes(seats: int) -> dict[Faction, int]:
    mafia, neutral = max(2, (seats + 2) // 4), (seats - 3) // 4
    return {Faction.MAFIA: mafia, Faction.NEUTRAL: neutral, Faction.TOWN: seats - mafia - neutral}


def cast(seats: int, rng: Random) -> list[str]:
    """Role names in seat order. There is always a looker, a protector, a mafia killer and at most one lone killer."""
    sizes = faction_sizes(seats)
    leaders = rng.sample(_LEADERS, 2 if sizes[Faction.MAFIA] > 2 else 1)
    followers = [name for name in _of(Faction.MAFIA) if name not in _LEADERS]
    roles = leaders + rng.sample(followers, sizes[Faction.MAFIA] - len(leaders))
    roles += _neutrals(sizes[Faction.NEUTRAL], rng)
    roles += _townsfolk(sizes[Faction.TOWN], rng)
    rng.shuffle(roles)
    return roles


def complaint(roles: Sequence[str]) -> str | None:
    """What is wrong with a list of roles chosen by hand, in one line."""
    if not FEWEST_SEATS <= len(roles) <= MOST_SEATS:
        return f"roles: {len(roles)} given, a game has {FEWEST_SEATS} to {MOST_SEATS} seats"
    for name in roles:
        if name not in ROLES:
            return f"roles: {name!r} is unknown; there are {', '.join(ROLES)}"
        if ROLES[name].unique and roles.count(name) > 1:
            return f"roles: {name} is unique but given {roles.count(name)} times"
    if not any(ROLES[name].hostile for name in roles):
        return "roles: none is hostile, so every game would be over before anybody is asked"
    return None


def _of(faction: Faction) -> list[str]:
    return [name for name, role in ROLES.items() if role.faction is faction]


def _neutrals(count: int, rng: Random) -> list[str]:
    killers = [name for name in _of(Faction.NEUTRAL) if ROLES[name].hostile]
    others = [name for name in _of(Faction.NEUTRAL) if not ROLES[name].hostile]
    # Two lone killers can be invulnerable to each other, and then neither the town nor they could ever win.
    pool = [rng.choice(killers), *others]
    return rng.sample(pool, min(count, len(pool)))


def _townsfolk(count: int, rng: Random) -> list[str]:
    roles = [rng.choice(_LOOKERS), rng.choice(_PROTECTORS)]
    names = _of(Faction.TOWN)
    while len(roles) < count:
        name = rng.choice(names)
        if roles.count(name) < (1 if ROLES[name].unique else _MOST_OF_ONE_ROLE):
            roles.append(name)
    return roles
