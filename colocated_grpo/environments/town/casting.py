"""Assignment of roles: a playable mix for 7 to 15 seats, and the checks of a cast chosen by the user."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from colocated_grpo.environments.town.roles import ROLES, Faction

MIN_SEATS, MAX_SEATS = 7, 15
NAMES = (
    "Ada", "Bram", "Cleo", "Dorn", "Elin", "Fitz", "Gwen", "Hugo",
    "Iris", "Jory", "Kaya", "Lars", "Mina", "Nils", "Opal",
)  # fmt: skip
"""Names of the players. None is a role, a tag or a substring of another, so a name in a text is unambiguous."""

_INVESTIGATORS = ("sheriff", "lookout", "tracker")
_PROTECTORS = ("doctor", "bodyguard")
_LEADERS = ("godfather", "mafioso")
_MAX_COPIES = 2
"""Maximum copies of a non-unique town role in a drawn cast."""


def faction_sizes(seats: int) -> dict[Faction, int]:
    """Return the number of seats of each faction in a cast of `seats`."""
    mafia, neutral = max(2, (seats + 2) // 4), (seats - 3) // 4
    return {Faction.MAFIA: mafia, Faction.NEUTRAL: neutral, Faction.TOWN: seats - mafia - neutral}


def draw_cast(seats: int, rng: Random) -> list[str]:
    """Return role names in seat order.

    A cast always has an investigator, a protector, a mafia killer and at most one neutral killer.
    """
    sizes = faction_sizes(seats)
    leaders = rng.sample(_LEADERS, 2 if sizes[Faction.MAFIA] > 2 else 1)
    followers = [name for name in _roles_of(Faction.MAFIA) if name not in _LEADERS]
    roles = leaders + rng.sample(followers, sizes[Faction.MAFIA] - len(leaders))
    roles += _neutrals(sizes[Faction.NEUTRAL], rng)
    roles += _townsfolk(sizes[Faction.TOWN], rng)
    rng.shuffle(roles)
    return roles


def cast_problem(roles: Sequence[str]) -> str | None:
    """Return a one-line error for the first rule that a user's list of roles breaks, or None."""
    if not MIN_SEATS <= len(roles) <= MAX_SEATS:
        return f"roles: {len(roles)} given; a game has {MIN_SEATS} to {MAX_SEATS} seats"
    for name in roles:
        if name not in ROLES:
            return f"roles: {name!r} is unknown; valid: {', '.join(ROLES)}"
        if ROLES[name].unique and roles.count(name) > 1:
            return f"roles: {name} is unique but given {roles.count(name)} times"
    if not any(ROLES[name].hostile for name in roles):
        return "roles: none is hostile, so every game would end before the first turn; add a killer"
    return None


def _roles_of(faction: Faction) -> list[str]:
    return [name for name, role in ROLES.items() if role.faction is faction]


def _neutrals(count: int, rng: Random) -> list[str]:
    killers = [name for name in _roles_of(Faction.NEUTRAL) if ROLES[name].hostile]
    others = [name for name in _roles_of(Faction.NEUTRAL) if not ROLES[name].hostile]
    # One killer at most: two can be invulnerable to each other, and then no faction could ever win.
    pool = [rng.choice(killers), *others]
    return rng.sample(pool, min(count, len(pool)))


def _townsfolk(count: int, rng: Random) -> list[str]:
    roles = [rng.choice(_INVESTIGATORS), rng.choice(_PROTECTORS)]
    names = _roles_of(Faction.TOWN)
    while len(roles) < count:
        name = rng.choice(names)
        if roles.count(name) < (1 if ROLES[name].unique else _MAX_COPIES):
            roles.append(name)
    return roles
