"""Everything that is true in one game, as plain data: what a snapshot holds and what a score may look at."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from random import Random
from typing import Any

from colocated_grpo.environments.town.casting import NAMES, cast
from colocated_grpo.environments.town.roles import ROLES, Faction, Role

NOBODY = -1
DRAW = "draw"


class Phase(StrEnum):
    PRE_NIGHT = "pre_night"
    NIGHT_TALK = "night_talk"
    NIGHT = "night"
    DISCUSSION = "discussion"
    NOMINATION = "nomination"
    DEFENCE = "defence"
    JUDGEMENT = "judgement"
    LAST_WORDS = "last_words"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a table may agree on."""

    discussion_rounds: int = 1
    """Turns to talk of every seat each day."""
    max_days: int = 10
    """The game is a draw after this day's trial and the night that follows."""
    trials_per_day: int = 3
    """Acquittals after which nobody else is brought to trial that day."""
    one_names_in: int = 3
    """One in this many of the living has to name somebody to bring them to trial. Players without a plan, such as an
    untrained policy, agree by chance only: the more of them it takes, the fewer trials they see."""
    tool_calls: int = 3
    """Look-ups a seat may make in one turn."""
    max_speech: int = 400
    """Characters of a speech, a whisper or a will."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "tool_calls" else 1
            if value < least:
                raise ValueError(f"town rules: {name}={value} is below {least}")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, and who noticed."""

    day: int
    phase: str
    kind: str
    actor: int = NOBODY
    target: int = NOBODY
    text: str = ""
    audience: tuple[int, ...] | None = None
    """Seats that noticed; None: everybody, (): only the record of the game."""

    def seen_by(self, seat: int) -> bool:
        return self.audience is None or seat in self.audience


@dataclass(slots=True)
class Seat:
    name: str
    role_name: str
    player: str
    """Label of who decides for this seat."""
    alive: bool = True
    uses: dict[str, int] = field(default_factory=dict)
    """What is left of the abilities that run out."""
    will: str = ""
    muted: bool = False
    doused: bool = False
    revealed: bool = False
    """A mayor who has shown the chain of office."""
    mark: int = NOBODY
    """Whom an executioner wants to see hanged."""
    goal_reached: bool = False
    """A jester or executioner who has already won."""
    hidden_end: bool = False
    """Role and will stayed unknown at death."""
    acted: int = 0
    """Committed completions; numbers the turns of the seat."""
    dialog: list[tuple[str, str]] = field(default_factory=list)
    """Look-ups of the turn under way: the completion and the observation that answered it."""

    @property
    def role(self) -> Role:
        return ROLES[self.role_name]

    def become(self, role_name: str) -> None:
        self.role_name = role_name
        self.uses = {ability.tag: ability.uses for ability in self.role.abilities if ability.uses is not None}


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One committed completion: what the outcome of the game is credited to."""

    turn_id: str
    seat: int
    phase: str
    status: int
    reward: float


@dataclass(slots=True)
class Game:
    number: int
    seed: int
    rules: Rules
    seats: list[Seat]
    phase: Phase = Phase.PRE_NIGHT
    day: int = 1
    """Night 1 comes first, then day 2: a night carries the number of the day before it."""
    waiting: list[int] = field(default_factory=list)
    """Seats still to act in this phase; in a talking phase the first one has the floor."""
    choices: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Tag and argument that seats chose in this phase and that take effect when it closes."""
    accused: int = NOBODY
    prisoner: int = NOBODY
    acquitted: list[int] = field(default_factory=list)
    """Tried today and let go."""
    draws: int = 0
    """Random streams used so far."""
    winner: str | None = None
    """A faction or DRAW once the game is over."""
    events: list[Event] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)

    def rng(self) -> Random:
        """A fresh stream: a counter is all a snapshot has to hold to go on with the same luck."""
        self.draws += 1
        return Random(f"{self.seed}/{self.draws}")

    def living(self) -> list[int]:
        return [index for index, seat in enumerate(self.seats) if seat.alive]

    def mafia(self) -> list[int]:
        return [i for i, seat in enumerate(self.seats) if seat.alive and seat.role.faction is Faction.MAFIA]

    def holders(self, role_name: str) -> list[int]:
        """Living seats with that role."""
        return [index for index, seat in enumerate(self.seats) if seat.alive and seat.role_name == role_name]

    def index(self, name: str) -> int:
        return next(index for index, seat in enumerate(self.seats) if seat.name == name)

    def names(self, seats: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.seats[index].name for index in seats)

    def announce(self, kind: str, actor: int = NOBODY, target: int = NOBODY, text: str = "") -> None:
        self.events.append(Event(self.day, self.phase, kind, actor, target, text))

    def tell(
        self, audience: Iterable[int], kind: str, actor: int = NOBODY, target: int = NOBODY, text: str = ""
    ) -> None:
        self.events.append(Event(self.day, self.phase, kind, actor, target, text, tuple(audience)))

    def record(self, kind: str, actor: int = NOBODY, target: int = NOBODY, text: str = "") -> None:
        """For the log only; no seat ever sees it."""
        self.tell((), kind, actor, target, text)


def new_game(number: int, seed: int, roles: list[str] | int, players: list[str], rules: Rules) -> Game:
    """A game before its first phase. `roles` is a cast by hand, or a number of seats; players are dealt at random."""
    rng = Random(f"{seed}/0")
    dealt = cast(roles, rng) if isinstance(roles, int) else rng.sample(roles, len(roles))
    names = rng.sample(NAMES, len(dealt))
    labels = [players[index % len(players)] for index in range(len(dealt))]
    rng.shuffle(labels)
    seats = [Seat(name, "citizen", label) for name, label in zip(names, labels, strict=True)]
    for seat, role in zip(seats, dealt, strict=True):
        seat.become(role)
    marks = [i for i, seat in enumerate(seats) if seat.role.faction is Faction.TOWN and not seat.role.unique]
    for seat in seats:
        if seat.role_name == "executioner":
            # Every cast of ours has a plain townsperson; one made by hand may not, and then there is nobody to hate.
            seat.mark = rng.choice(marks) if marks else NOBODY
    return Game(number, seed, rules, seats)


def to_json(game: Game) -> dict[str, Any]:
    """Plain data that json can write and that later turns do not touch; from_json gives an equal game back."""
    return {
        **{each.name: getattr(game, each.name) for each in fields(game)},
        "rules": asdict(game.rules),
        "seats": [asdict(seat) for seat in game.seats],
        "phase": str(game.phase),
        "waiting": list(game.waiting),
        "choices": [[seat, tag, argument] for seat, (tag, argument) in sorted(game.choices.items())],
        "acquitted": list(game.acquitted),
        # By hand: asdict copies every field of every event, and a snapshot is taken before every step.
        "events": [[e.day, e.phase, e.kind, e.actor, e.target, e.text, e.audience] for e in game.events],
        "turns": [[t.turn_id, t.seat, t.phase, t.status, t.reward] for t in game.turns],
    }


def frozen(game: Game) -> dict[str, Any]:
    """What a score looks at: everything but the past."""
    return to_json(replace(game, events=[], turns=[]))


def from_json(data: dict[str, Any]) -> Game:
    data = deepcopy(data)  # The lists of the game are its own: a snapshot can be restored more than once.
    seats = [Seat(**{**seat, "dialog": [tuple(pair) for pair in seat["dialog"]]}) for seat in data["seats"]]
    parts = {
        "rules": Rules(**data["rules"]),
        "seats": seats,
        "phase": Phase(data["phase"]),
        "choices": {seat: (tag, argument) for seat, tag, argument in data["choices"]},
        "events": [Event(*row[:-1], None if row[-1] is None else tuple(row[-1])) for row in data["events"]],
        "turns": [TurnRecord(*row) for row in data["turns"]],
    }
    return Game(**{**data, **parts})
