"""What to watch while a policy learns the game, and when it has learned the form."""

from __future__ import annotations

from dataclasses import dataclass, field

from colocated_grpo.environments.town.grammar import TOOLS
from colocated_grpo.environments.town.verdicts import Status, Verdict


@dataclass(slots=True)
class Kpis:
    """Counts since the last reset; rates are taken from sums, so that windows of any size add up."""

    turns: int = 0
    parsed: int = 0
    legal: int = 0
    look_ups: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    """Error code -> replies."""
    phase_turns: dict[str, int] = field(default_factory=dict)
    phase_rewards: dict[str, float] = field(default_factory=dict)
    games: int = 0
    days: int = 0
    wins: dict[str, int] = field(default_factory=dict)
    """Faction or 'draw' -> games."""
    tags: dict[str, int] = field(default_factory=dict)
    """Legal actions by tag: votes, whispers, nominations ..."""

    def turn(self, phase: str, verdict: Verdict, reward: float) -> None:
        fine = verdict.status is Status.OK
        self.turns += 1
        self.parsed += verdict.status is not Status.MALFORMED
        self.legal += fine
        self.look_ups += fine and verdict.tag in TOOLS
        counted, key = (self.tags, verdict.tag) if fine else (self.codes, verdict.code)
        counted[key] = counted.get(key, 0) + 1
        self.phase_turns[phase] = self.phase_turns.get(phase, 0) + 1
        self.phase_rewards[phase] = self.phase_rewards.get(phase, 0.0) + reward

    def game(self, winner: str, days: int) -> None:
        self.games += 1
        self.days += days
        self.wins[winner] = self.wins.get(winner, 0) + 1

    def rates(self) -> dict[str, float]:
        """By name, ready for a metrics table. What has not been seen is left out rather than shown as zero."""
        rates: dict[str, float] = {"turns": self.turns, "games": self.games}
        if self.turns:
            rates |= {
                "parse_rate": self.parsed / self.turns,
                "legal_rate": self.legal / self.turns,
                "look_up_rate": self.look_ups / self.turns,
            }
        if self.games:
            rates["days_per_game"] = self.days / self.games
            rates |= {f"win_rate/{winner}": count / self.games for winner, count in sorted(self.wins.items())}
        for phase, count in sorted(self.phase_turns.items()):
            rates[f"reward/{phase}"] = self.phase_rewards[phase] / count
        rates |= {f"error/{code}": count / self.turns for code, count in sorted(self.codes.items())}
        rates |= {f"action/{tag}": count / self.turns for tag, count in sorted(self.tags.items())}
        return rates


@dataclass(slots=True)
class EarlyStop:
    """Says stop once the parse rate has stood at the threshold for a number of windows in a row."""

    threshold: float = 0.99
    consecutive: int = 1000
    reached: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1 or self.consecutive < 1:
            raise ValueError(
                f"town early stop: threshold={self.threshold} must be in (0, 1], consecutive={self.consecutive} >= 1"
            )

    def due(self, parse_rate: float | None) -> bool:
        """Counts one window. None, a window without turns, neither helps nor hurts."""
        if parse_rate is not None:
            self.reached = self.reached + 1 if parse_rate >= self.threshold else 0
        return self.reached >= self.consecutive
