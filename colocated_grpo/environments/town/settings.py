"""Settings of town."""

from __future__ import annotations

from dataclasses import dataclass, field

from colocated_grpo.environments.town.casting import MAX_SEATS, MIN_SEATS, cast_problem
from colocated_grpo.environments.town.players import SCRIPTED
from colocated_grpo.environments.town.prompts import PROMPT_STYLES
from colocated_grpo.environments.town.rewards import CREDITS, Credit
from colocated_grpo.environments.town.state import Rules

POLICY = "policy"
"""Label of the seats that the trained policy plays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TownSettings:
    """The `args` of town. Example: TownSettings(games=8, seats=9, seed=1, players=("policy", "sensible"))"""

    games: int = 4
    """Games played side by side. A new game replaces each one that ends."""
    seats: int | tuple[int, int] = 7
    """Seats of a game, or (lowest, highest), drawn for each game."""
    roles: tuple[str, ...] = ()
    """The cast, dealt at random. Empty: a playable mix is drawn for each game."""
    seed: int = 0
    players: tuple[str, ...] = (POLICY,)
    """Labels of the players, repeated over the seats. 'sensible' and 'random' are scripts; models play all others."""
    credit: Credit = field(default_factory=lambda: CREDITS["phase"])
    rules: Rules = field(default_factory=Rules)
    memory: int = 60
    """Latest events that a prompt contains; older ones can be looked up."""
    prompts: str = "full"
    """full: rules and situation in sentences. brief: names and tags, for models of a few million parameters.
    docs/guides/games.md gives their lengths."""

    def __post_init__(self) -> None:
        low, high = self.seat_bounds
        if self.games < 1 or self.memory < 1:
            raise ValueError(f"town: games={self.games}, memory={self.memory}: both must be at least 1")
        if not MIN_SEATS <= low <= high <= MAX_SEATS:
            raise ValueError(f"town: seats={self.seats}: not within {MIN_SEATS} to {MAX_SEATS}")
        if self.prompts not in PROMPT_STYLES:
            raise ValueError(f"town: prompts={self.prompts!r}: unknown style; valid: {', '.join(PROMPT_STYLES)}")
        if self.roles and (problem := cast_problem(self.roles)):
            raise ValueError(f"town: {problem}")
        if all(label in SCRIPTED for label in self.players):
            raise ValueError(
                f"town: players={list(self.players)}: all are scripted, so there is nothing to train; add {POLICY!r}"
            )
        fewest = len(self.roles) or low
        if len(self.players) > fewest:
            raise ValueError(f"town: players={list(self.players)}: more than the {fewest} seats of a game")

    @property
    def seat_bounds(self) -> tuple[int, int]:
        """(lowest, highest) number of seats."""
        return (self.seats, self.seats) if isinstance(self.seats, int) else self.seats
