"""Win rates, and credit assignment: the weight of a game's outcome in the reward of each turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeCredit:
    """Settings that weight a seat's outcome in the rewards of its turns."""

    outcome: float = 0.0
    """Weight of the outcome. At 0 turns train without waiting for their game to end."""
    discount: float = 1.0
    """Factor on the weight per later turn of the same seat."""

    def __post_init__(self) -> None:
        if not 0 < self.discount <= 1:
            raise ValueError(f"credit: discount={self.discount} is not in (0, 1]")

    def weights(self, seats: Sequence[int]) -> list[float]:
        """Return the weight of the outcome for each turn of a game. seats: the seat of each turn, in order."""
        later: Counter[int] = Counter()
        weights = []
        for seat in reversed(seats):
            weights.append(self.outcome * self.discount ** later[seat])
            later[seat] += 1
        return weights[::-1]


def win_rates(results: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the fraction of seats that won, by name. results: (name, positive if won) of each seat."""
    won: dict[str, list[bool]] = {}
    for name, result in results:
        won.setdefault(name, []).append(result > 0)
    return {name: sum(seats) / len(seats) for name, seats in won.items()}
