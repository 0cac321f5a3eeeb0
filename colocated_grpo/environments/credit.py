"""How the end of a game is credited to the turns that led to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeCredit:
    """What a turn gets of the outcome that its seat had."""

    outcome: float = 0.0
    """Weight. At 0 no turn has to wait for the end of its game."""
    discount: float = 1.0
    """Of the outcome, for every later turn of the same seat."""

    def __post_init__(self) -> None:
        if not 0 < self.discount <= 1:
            raise ValueError(f"credit: discount={self.discount} is not in (0, 1]")

    def shares(self, seats: Sequence[int]) -> list[float]:
        """What to multiply the outcome with, for each turn of a game. seats: who took it, in the order of turns."""
        later: Counter[int] = Counter()
        shares = []
        for seat in reversed(seats):
            shares.append(self.outcome * self.discount ** later[seat])
            later[seat] += 1
        return shares[::-1]
