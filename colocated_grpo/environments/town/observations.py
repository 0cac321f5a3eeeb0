"""The view of one seat.

Prompts, look-ups and scripted players read the game only through this view, so no secret can leak.
"""

from dataclasses import dataclass
from typing import NamedTuple

from colocated_grpo.environments.town.legality import LegalActions, legal_actions, look_ups, nominations_needed
from colocated_grpo.environments.town.roles import ROLES, Faction, Role
from colocated_grpo.environments.town.state import NO_SEAT, Event, Game, Phase


class Grave(NamedTuple):
    """A dead player. Example: Grave(seat=3, name="Ada", role_name="doctor", will="I nursed Bram")"""

    seat: int
    name: str
    role_name: str
    will: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything that a seat may know at one moment."""

    seat: int
    names: tuple[str, ...]
    """Names by seat; events refer to seats by index."""
    role_name: str
    phase: Phase
    day: int
    living: tuple[int, ...]
    allies: dict[int, str]
    """Role names of the other mafia members by seat, dead ones included. Empty outside the mafia."""
    will: str
    accused: int
    nominations_needed: int
    """Nominations of one player that start a trial."""
    graves: tuple[Grave, ...]
    events: tuple[Event, ...]
    """Events that the seat saw, oldest first."""
    legal: LegalActions
    look_ups: LegalActions
    """Look-ups of the phase, listed even if none is left in this turn."""
    dialog: tuple[tuple[str, str], ...]
    """(completion, observation) of each look-up of this turn so far."""
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
    """Return the game as the seat sees it now."""
    holder = game.seats[seat]
    mafia = {index: other.role_name for index, other in enumerate(game.seats) if other.role.faction is Faction.MAFIA}
    dead = [(index, other) for index, other in enumerate(game.seats) if not other.alive]
    return Observation(
        seat=seat,
        names=tuple(other.name for other in game.seats),
        role_name=holder.role_name,
        phase=game.phase,
        day=game.day,
        living=tuple(game.living()),
        allies={index: name for index, name in mafia.items() if seat in mafia and index != seat},
        will=holder.will,
        # The deciding nomination sets game.accused before the trial makes the accused public.
        accused=game.accused if game.phase in (Phase.DEFENCE, Phase.JUDGEMENT, Phase.LAST_WORDS) else NO_SEAT,
        nominations_needed=nominations_needed(game),
        graves=tuple(Grave(index, other.name, other.role_name, other.will) for index, other in dead),
        events=tuple(event for event in game.events if event.audience is None or seat in event.audience),
        legal=legal_actions(game, seat),
        look_ups=look_ups(game, seat),
        dialog=tuple(holder.dialog),
        tool_calls=game.rules.tool_calls,
        max_speech=game.rules.max_speech,
    )
