"""What a user may choose about the tables of town."""

from __future__ import annotations

from dataclasses import dataclass, field

from colocated_grpo.environments.town.casting import FEWEST_SEATS, MOST_SEATS, complaint
from colocated_grpo.environments.town.players import SCRIPTED
from colocated_grpo.environments.town.prompts import PROMPTS
from colocated_grpo.environments.town.rewards import CREDITS, Credit
from colocated_grpo.environments.town.state import Rules

POLICY = "policy"
"""Label of the seats that the trained policy plays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TownSettings:
    """One kind of table. Example: TownSettings(games=8, seats=9, seed=1, players=("policy", "sensible"))"""

    games: int = 4
    """Games played side by side; one that ends is followed by a new one."""
    seats: int | tuple[int, int] = 7
    """People at the table, or bounds between which each game draws."""
    roles: tuple[str, ...] = ()
    """The cast, dealt at random; empty: a fresh playable mix for each game."""
    seed: int = 0
    players: tuple[str, ...] = (POLICY,)
    """Labels dealt round the table: 'sensible' and 'random' play by script, all others are asked for."""
    credit: Credit = field(default_factory=lambda: CREDITS["phase"])
    rules: Rules = field(default_factory=Rules)
    memory: int = 60
    """Latest events that a prompt tells; older ones can be looked up."""
    prompts: str = "full"
    """Wording. full: rules and situation in sentences. brief: names and tags, for models of a few million parameters.
    Their lengths: docs/guides/games.md."""

    def __post_init__(self) -> None:
        low, high = self.seat_bounds
        if self.games < 1 or self.memory < 1:
            raise ValueError(f"town: games={self.games} and memory={self.memory} must be at least 1")
        if not FEWEST_SEATS <= low <= high <= MOST_SEATS:
            raise ValueError(f"town: seats={self.seats} is not within {FEWEST_SEATS} to {MOST_SEATS}")
        if self.prompts not in PROMPTS:
            raise ValueError(f"town: prompts={self.prompts!r} is none of {', '.join(PROMPTS)}")
        if self.roles and (wrong := complaint(self.roles)):
            raise ValueError(f"town {wrong}")
        if all(label in SCRIPTED for label in self.players):
            raise ValueError(f"town: players={list(self.players)} are all scripted, so there is no turn to train on")
        if len(self.players) > (len(self.roles) or low):
            raise ValueError(f"town: {len(self.players)} players are more than the {len(self.roles) or low} seats")

    @property
    def seat_bounds(self) -> tuple[int, int]:
        return (self.seats, self.seats) if isinstance(self.seats, int) else self.seats
