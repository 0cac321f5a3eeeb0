"""Statistics of the committed turns and of the ended games."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from colocated_grpo.environments.town.grammar import LOOK_UP_TAGS
from colocated_grpo.environments.town.verdicts import Status, Verdict
from colocated_grpo.environments.turns.credit import win_rates

WIN_RATE_GAMES = 100
"""Number of latest games that win rates cover."""


@dataclass(slots=True)
class TownStats:
    """Counts since the last reset. Field names are keys of checkpoints.

    parse_rate, legal_rate and the reward by phase are not counted here: they are means over all completions, committed
    or not.
    """

    turns: int = 0
    look_ups: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    """Rejected replies by error code."""
    games: int = 0
    days: int = 0
    winners: list[str] = field(default_factory=list)
    """Faction or 'draw' of each of the latest games. Kept across resets, because few games end in one step."""
    won: dict[str, list[float]] = field(default_factory=dict)
    """Share of seats that won in each of the latest games, by player. Kept across resets."""
    tags: dict[str, int] = field(default_factory=dict)
    """Legal actions by tag."""

    def add_turn(self, verdict: Verdict) -> None:
        """Add a committed turn."""
        legal = verdict.status is Status.OK
        self.turns += 1
        self.look_ups += legal and verdict.tag in LOOK_UP_TAGS
        counts, key = (self.tags, verdict.tag) if legal else (self.codes, verdict.code)
        counts[key] = counts.get(key, 0) + 1

    def add_game(self, winner: str, days: int, results: Sequence[tuple[str, float]]) -> None:
        """Add an ended game. results: (player, +1 won, 0 draw, -1 lost) for each seat."""
        self.games += 1
        self.days += days
        self.winners = [*self.winners[1 - WIN_RATE_GAMES :], str(winner)]
        for player, share in win_rates(results).items():
            self.won[player] = [*self.won.get(player, [])[1 - WIN_RATE_GAMES :], share]

    def after_reset(self) -> TownStats:
        """Return statistics with all counts at zero and the latest games kept."""
        return TownStats(winners=self.winners, won=self.won)

    def rates(self) -> dict[str, float]:
        """Return the metrics by name. A rate without data is left out rather than reported as zero."""
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
