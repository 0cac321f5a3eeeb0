"""What one seat may know. Prompts, look-ups and scripted players see the game through this and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from colocated_grpo.environments.town.endings import UNKNOWN
from colocated_grpo.environments.town.legality import Legal, legal_actions, look_ups, needed_to_accuse
from colocated_grpo.environments.town.roles import ROLES, Faction, Role
from colocated_grpo.environments.town.state import NOBODY, Event, Game, Phase


@dataclass(frozen=True, slots=True)
class Grave:
    """Example: Grave(seat=3, name="Ada", role_name="doctor", will="I nursed Bram")"""

    seat: int
    name: str
    role_name: str
    """UNKNOWN when the body gave nothing away."""
    will: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    seat: int
    names: tuple[str, ...]
    """Of all seats, in seat order: events name seats by number."""
    role_name: str
    phase: Phase
    day: int
    living: tuple[int, ...]
    allies: dict[int, str]
    """Role names of the other mafia members, dead or alive; empty outside the mafia."""
    mark: int
    """Whom an executioner wants to see hanged."""
    will: str
    accused: int
    needed_to_accuse: int
    """Nominations of one person that bring on a trial."""
    graves: tuple[Grave, ...]
    events: tuple[Event, ...]
    """What the seat noticed, oldest first."""
    legal: Legal
    look_ups: Legal
    """What may be asked in this turn, spent or not."""
    dialog: tuple[tuple[str, str], ...]
    """Look-ups of this turn so far."""
    tool_calls: int
    """Look-ups that the rules allow in one turn."""
    max_speech: int

    @property
    def name(self) -> str:
        return self.names[self.seat]

    @property
    def role(self) -> Role:
        return ROLES[self.role_name]


def observe(game: Game, seat: int) -> Observation:
    """The game as the seat sees it now."""
    holder = game.seats[seat]
    return Observation(
        seat=seat,
        names=tuple(other.name for other in game.seats),
        role_name=holder.role_name,
        phase=game.phase,
        day=game.day,
        living=tuple(game.living()),
        allies=_allies(game, seat),
        mark=holder.mark,
        will=holder.will,
        # Set while half of the town has just named somebody, and public from then on.
        accused=game.accused if game.phase in (Phase.DEFENCE, Phase.JUDGEMENT, Phase.LAST_WORDS) else NOBODY,
        needed_to_accuse=needed_to_accuse(game),
        graves=graves(game),
        events=tuple(event for event in game.events if event.seen_by(seat)),
        legal=legal_actions(game, seat),
        look_ups=look_ups(game, seat),
        dialog=tuple(holder.dialog),
        tool_calls=game.rules.tool_calls,
        max_speech=game.rules.max_speech,
    )


def graves(game: Game) -> tuple[Grave, ...]:
    return tuple(
        Grave(index, seat.name, UNKNOWN, "") if seat.hidden_end else Grave(index, seat.name, seat.role_name, seat.will)
        for index, seat in enumerate(game.seats)
        if not seat.alive
    )


def _allies(game: Game, seat: int) -> dict[int, str]:
    if game.seats[seat].role.faction is not Faction.MAFIA:
        return {}
    return {
        index: other.role_name
        for index, other in enumerate(game.seats)
        if index != seat and other.role.faction is Faction.MAFIA
    }
