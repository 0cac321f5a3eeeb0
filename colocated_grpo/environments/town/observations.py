"""The view of one seat.

Prompts, look-ups and scripted players read the game only through this view, so no secret can leak.
"""

from typing import NamedTuple

from colocated_grpo.environments.town.legality import legal_actions, look_ups, nominations_needed
from colocated_grpo.environments.town.roles import Faction
from colocated_grpo.environments.town.state import NO_SEAT, Game, Phase


class Grave(NamedTuple):
    """A dead player. Example: Grave(seat=3, name="Ada", role_name="doctor", will="I nursed Bram")"""

    seat: int
    name: str
    role_name: str
    will: str


class Observation:
    """Everything that a seat may know at one moment. Seats are referred to by index."""

    def __init__(self, game: Game, seat: int) -> None:
        holder = game.seats[seat]
        self.seat = seat
        self.names = tuple(other.name for other in game.seats)
        self.name = holder.name
        self.role = holder.role
        self.phase = game.phase
        self.day = game.day
        self.living = tuple(game.living())
        mafia = {
            index: other.role_name for index, other in enumerate(game.seats) if other.role.faction is Faction.MAFIA
        }
        self.allies = {index: name for index, name in mafia.items() if seat in mafia and index != seat}
        """Role names of the other mafia members by seat, dead ones included. Empty outside the mafia."""
        self.will = holder.will
        # The deciding nomination sets game.accused before the trial makes the accused public.
        on_trial = game.phase in (Phase.DEFENCE, Phase.JUDGEMENT, Phase.LAST_WORDS)
        self.accused = game.accused if on_trial else NO_SEAT
        self.nominations_needed = nominations_needed(game)
        """Nominations of one player that start a trial."""
        dead = [(index, other) for index, other in enumerate(game.seats) if not other.alive]
        self.graves = tuple(Grave(index, other.name, other.role_name, other.will) for index, other in dead)
        self.events = tuple(event for event in game.events if event.audience is None or seat in event.audience)
        """Events that the seat saw, oldest first."""
        self.legal = legal_actions(game, seat)
        self.look_ups = look_ups(game, seat)
        """Look-ups of the phase, listed even if none is left in this turn."""
        self.dialog = tuple(holder.dialog)
        """(completion, observation) of each look-up of this turn so far."""
        self.tool_calls = game.rules.tool_calls
        """Look-ups that the rules allow in one turn."""
        self.max_speech = game.rules.max_speech
