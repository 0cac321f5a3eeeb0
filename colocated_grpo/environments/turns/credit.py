"""What the end of a game counts for: the turns that led to it, and the rates of winning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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


def shares_won(results: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Name -> the share of its seats that won. results: (name, above 0 where it won) of each seat."""
    won: dict[str, list[bool]] = {}
    for name, result in results:
        won.setdefault(name, []).append(result > 0)
    return {name: sum(seats) / len(seats) for name, seats in won.items()}
