"""What to watch while a policy learns the game."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from colocated_grpo.environments.town.grammar import TOOLS
from colocated_grpo.environments.town.verdicts import Status, Verdict
from colocated_grpo.environments.turns.credit import win_rates

LATEST_GAMES = 100
"""Games over which win rates look back."""


@dataclass(slots=True)
class Kpis:
    """Counts since the last reset; rates are taken from sums, so that windows of any size add up.

    Of turns carried out and of games. How well replies were formed, and their rewards by phase, are means over all
    completions and not counted here.
    """

    turns: int = 0
    look_ups: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    """Error code -> replies."""
    games: int = 0
    days: int = 0
    winners: list[str] = field(default_factory=list)
    """Faction or 'draw' of the latest games, also of those before the reset: few games end in one step."""
    won: dict[str, list[float]] = field(default_factory=dict)
    """Player -> share of its seats that won, for each of the latest games."""
    tags: dict[str, int] = field(default_factory=dict)
    """Legal actions by tag: votes, whispers, nominations ..."""

    def turn(self, verdict: Verdict) -> None:
        fine = verdict.status is Status.OK
        self.turns += 1
        self.look_ups += fine and verdict.tag in TOOLS
        counted, key = (self.tags, verdict.tag) if fine else (self.codes, verdict.code)
        counted[key] = counted.get(key, 0) + 1

    def game(self, winner: str, days: int, results: Sequence[tuple[str, float]]) -> None:
        """results: (player, +1 won or 0 draw or -1 lost) of each seat."""
        self.games += 1
        self.days += days
        self.winners = [*self.winners[1 - LATEST_GAMES :], str(winner)]
        for player, share in win_rates(results).items():
            self.won[player] = [*self.won.get(player, [])[1 - LATEST_GAMES :], share]

    def after_reset(self) -> Kpis:
        """Nothing counted yet, and the latest games as they are."""
        return Kpis(winners=self.winners, won=self.won)

    def rates(self) -> dict[str, float]:
        """By name, ready for a metrics table. What has not been seen is left out rather than shown as zero."""
        rates: dict[str, float] = {"turns": self.turns, "games": self.games}
        if self.turns:
            rates["look_up_rate"] = self.look_ups / self.turns
        if self.games:
            rates["days_per_game"] = self.days / self.games
        for winner, count in sorted(Counter(self.winners).items()):
            rates[f"win_rate/{winner}"] = count / len(self.winners)
        for player, shares in sorted(self.won.items()):
            rates[f"win_rate/{player}"] = sum(shares) / len(shares)
        rates |= {f"error/{code}": count / self.turns for code, count in sorted(self.codes.items())}
        rates |= {f"action/{tag}": count / self.turns for tag, count in sorted(self.tags.items())}
        return rates
