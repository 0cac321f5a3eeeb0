"""State of one game, and its snapshot as plain data. Field names are keys of checkpoints."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import NamedTuple

from pydantic import Field, TypeAdapter

from colocated_grpo.environments.town.roles import ROLES, Faction, Role
from colocated_grpo.settings.base import Section
from colocated_grpo.types import JsonObject

MIN_SEATS, MAX_SEATS = 7, 15
NAMES = (
    "Ada", "Bram", "Cleo", "Dorn", "Elin", "Fitz", "Gwen", "Hugo",
    "Iris", "Jory", "Kaya", "Lars", "Mina", "Nils", "Opal",
)  # fmt: skip
"""Names of the players. No name is a role, a tag or a substring of another name, so a name in a text is unambiguous."""

_INVESTIGATORS = ("sheriff", "lookout")
_LEADERS = ("godfather", "mafioso")
_MAX_COPIES = 2
"""Maximum copies of a non-unique town role in a drawn cast."""


def faction_sizes(seats: int) -> dict[Faction, int]:
    mafia, neutral = max(2, (seats + 2) // 4), (seats - 3) // 4
    return {Faction.MAFIA: mafia, Faction.NEUTRAL: neutral, Faction.TOWN: seats - mafia - neutral}


def draw_cast(seats: int, rng: Random) -> list[str]:
    """Return role names in seat order. No cast has two neutral killers, who would be invulnerable to each other."""
    sizes = faction_sizes(seats)
    leaders = rng.sample(_LEADERS, 2 if sizes[Faction.MAFIA] > 2 else 1)
    roles = leaders + ["informer"] * (sizes[Faction.MAFIA] - len(leaders))
    roles += rng.sample(["slayer", *["jester"] * 3], sizes[Faction.NEUTRAL])
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


def _townsfolk(count: int, rng: Random) -> list[str]:
    roles = [rng.choice(_INVESTIGATORS), "doctor"]
    names = [name for name, role in ROLES.items() if role.faction is Faction.TOWN]
    while len(roles) < count:
        name = rng.choice(names)
        if roles.count(name) < (1 if ROLES[name].unique else _MAX_COPIES):
            roles.append(name)
    return roles


NO_SEAT = -1
"""Seat index that stands for no seat."""
DRAW = "draw"


class Phase(StrEnum):
    """Phases in the order of a round. An acquittal returns to NOMINATION; a hanging, or no trial, ends the round."""

    PRE_NIGHT = "pre_night"
    NIGHT_TALK = "night_talk"
    NIGHT = "night"
    DISCUSSION = "discussion"
    NOMINATION = "nomination"
    DEFENCE = "defence"
    JUDGEMENT = "judgement"
    LAST_WORDS = "last_words"
    OVER = "over"


class Rules(Section):
    """Options of the game, `args.rules` of town."""

    discussion_rounds: int = Field(1, ge=1)
    """Turns per seat in each day's discussion."""
    max_days: int = Field(10, ge=1)
    """Last day. The game is a draw if it has no winner after the night that follows."""
    trials_per_day: int = Field(3, ge=1)
    """Maximum trials in a day. The first hanging ends the day earlier."""
    one_names_in: int = Field(3, ge=1)
    """A trial starts when 1/one_names_in of the living players, rounded up, have nominated the same player. Players
    without a plan, such as an untrained policy, agree only by chance, so a lower value gives them fewer trials."""
    tool_calls: int = Field(3, ge=0)
    """Look-ups that a seat may make in one turn."""
    max_speech: int = Field(400, ge=1)
    """Characters of a speech, a whisper or a will."""


class Event(NamedTuple):
    """Something that happened in the game, and the seats that saw it."""

    day: int
    phase: str
    kind: str
    actor: int = NO_SEAT
    target: int = NO_SEAT
    text: str = ""
    audience: tuple[int, ...] | None = None
    """Seats that saw the event. None: all seats. (): no seat; the event is only recorded."""


@dataclass(slots=True)
class Seat:
    """State of one player."""

    name: str
    role_name: str
    player: str
    """Label of the player, from `args.players`."""
    alive: bool = True
    uses: dict[str, int] = field(default_factory=dict)
    """Remaining uses of limited abilities, by tag."""
    will: str = ""
    revealed: bool = False
    """True for a mayor who has revealed the role."""
    goal_reached: bool = False
    """True for a jester who has already won."""
    acted: int = 0
    """Completions applied so far, look-ups included. Part of turn ids."""
    dialog: list[tuple[str, str]] = field(default_factory=list)
    """(completion, observation) of each look-up of the current turn."""

    @property
    def role(self) -> Role:
        return ROLES[self.role_name]

    def become(self, role_name: str) -> None:
        """Take on a role, with all its uses."""
        self.role_name = role_name
        ability = self.role.ability
        self.uses = {} if ability is None or ability.uses is None else {ability.tag: ability.uses}


@dataclass(slots=True)
class Game:
    """State of one game. Seats are referred to by index."""

    number: int
    seed: int
    rules: Rules
    seats: list[Seat]
    phase: Phase = Phase.PRE_NIGHT
    day: int = 1
    """The game starts with night 1, followed by day 2. Every later night has the number of the preceding day."""
    waiting: list[int] = field(default_factory=list)
    """Seats still to act in this phase. In phases with turns, the first of them has the turn."""
    choices: dict[int, tuple[str, str]] = field(default_factory=dict)
    """(tag, argument) by seat: the choices of this phase, which take effect when the phase closes."""
    accused: int = NO_SEAT
    prisoner: int = NO_SEAT
    acquitted: list[int] = field(default_factory=list)
    """Seats acquitted today."""
    draws: int = 0
    """Random streams used so far; see rng()."""
    winner: str | None = None
    """The winning faction or DRAW; None while the game is open."""
    events: list[Event] = field(default_factory=list)
    turns: list[tuple[str, int]] = field(default_factory=list)
    """(turn id, seat) of each committed completion, to be credited with the outcome."""

    def rng(self) -> Random:
        """Return a new random stream, derived from seed and counter, so that a snapshot needs no generator state."""
        self.draws += 1
        return Random(f"{self.seed}/{self.draws}")

    def living(self) -> list[int]:
        return [index for index, seat in enumerate(self.seats) if seat.alive]

    def mafia(self) -> list[int]:
        return [i for i, seat in enumerate(self.seats) if seat.alive and seat.role.faction is Faction.MAFIA]

    def living_with_role(self, role_name: str) -> list[int]:
        return [index for index, seat in enumerate(self.seats) if seat.alive and seat.role_name == role_name]

    def index(self, name: str) -> int:
        return next(index for index, seat in enumerate(self.seats) if seat.name == name)

    def names(self, seats: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.seats[index].name for index in seats)

    def announce(
        self,
        kind: str,
        actor: int = NO_SEAT,
        target: int = NO_SEAT,
        text: str = "",
        *,
        audience: Iterable[int] | None = None,
    ) -> None:
        """Add an event. audience: the seats that see it; None: all seats; (): no seat, the event is only recorded."""
        seen_by = None if audience is None else tuple(audience)
        self.events.append(Event(self.day, str(self.phase), kind, actor, target, text, seen_by))


def new_game(number: int, seed: int, roles: list[str] | int, players: list[str], rules: Rules) -> Game:
    """Return a game before its first phase. roles: the cast, or its size. players: labels, repeated over the seats."""
    rng = Random(f"{seed}/0")
    dealt = draw_cast(roles, rng) if isinstance(roles, int) else rng.sample(roles, len(roles))
    names = rng.sample(NAMES, len(dealt))
    labels = [players[index % len(players)] for index in range(len(dealt))]
    rng.shuffle(labels)
    seats = [Seat(name, "citizen", label) for name, label in zip(names, labels, strict=True)]
    for seat, role in zip(seats, dealt, strict=True):
        seat.become(role)
    return Game(number, seed, rules, seats)


_GAME = TypeAdapter(Game)


def snapshot_game(game: Game) -> JsonObject:
    """Return plain data that json can write and that later turns do not change."""
    return _GAME.dump_python(game, mode="json")


def restore_game(data: JsonObject) -> Game:
    """Return the game of a snapshot. All lists are copied, so the snapshot can be restored again."""
    return _GAME.validate_python(data)
