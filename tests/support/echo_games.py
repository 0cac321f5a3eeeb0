"""A minimal turn environment: each turn asks for a word, and the reward is its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

RECORDS: dict[str, dict[str, Any]] = {
    "unnamed": {"game": "first", "winner": "draw"},
    "lines": {"game": 0, "winner": "draw", "transcript": ["a", "b"]},
    "words": {"game": 0, "winner": "draw", "events": ["a"]},
}
"""Records with a value of a wrong type, by name."""


@dataclass(frozen=True)
class EchoTurn:
    id: str
    game: int
    left: int
    """Turns until the end of the game, including this one."""
    trainable: bool = True
    phase: str = "talk"

    @property
    def messages(self) -> str:
        return f"{self.id} of {self.left}"

    def pattern(self) -> str:
        return "[ab]{1,3}"


@dataclass(frozen=True)
class EchoOutcome:
    reward: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EchoReturn:
    turn_id: str
    value: float


class Echo:
    """`games` games of `length` turns, one open turn each. The end of a game returns `pays` to each of its turns.

    frozen_seat: every second turn belongs to the opponent. bad: the method that misbehaves.
    """

    def __init__(
        self, seed: int, games: int = 1, length: int = 3, pays: float = 0.0, frozen_seat: bool = False, bad: str = ""
    ) -> None:
        self.seed, self.length, self.pays, self.bad = seed, length, pays, bad
        self.frozen_seat = frozen_seat
        self.games = dict.fromkeys(range(games), length)
        self.started = games
        self.committed: list[tuple[str, str]] = []
        self.passed: list[str] = []
        self._turns: dict[int, list[str]] = {}
        self._ended: list[int] = []

    @property
    def delayed(self) -> bool:
        return self.pays != 0

    def next_batch(self) -> Any:
        if self.bad == "no turns":
            return None
        if self.bad == "text":
            return [str(number) for number in self.games]
        return [] if self.bad == "silent" else [self._turn(number) for number in self.games]

    def _turn(self, number: int) -> EchoTurn:
        left = self.games[number]
        names = {"numbers": 10 * number + left, "repeated": "0"}
        trainable = self.bad != "absent" and not (self.frozen_seat and left % 2 == 0)
        return EchoTurn(names.get(self.bad, f"{number}.{left}"), number, left, trainable=trainable)

    def add_game(self) -> list[EchoTurn]:
        if self.bad == "silent":
            return []
        self.games[self.started] = self.length
        self.started += 1
        return [self._turn(self.started - 1)]

    def score(self, turn: EchoTurn, completions: Sequence[str]) -> list[EchoOutcome]:
        if self.bad == "score":
            raise KeyError("no such word")
        number = Fraction if self.bad == "fractions" else float
        return [EchoOutcome(number(len(text)), {"parse_rate": number("a" in text)}) for text in completions]

    def commit(self, turn: EchoTurn, completion: str) -> None:
        if self.bad == "commit":
            raise RuntimeError("the game\nis broken")
        assert self._turn(turn.game) == turn, "turn is not open"
        self.committed.append((turn.id, completion))
        self._turns.setdefault(turn.game, []).append(turn.id)
        if self.bad != "open again":
            self._advance(turn.game)

    def play_on(self, turn: EchoTurn) -> None:
        if self.bad == "play_on":
            raise RuntimeError("no script")
        self.passed.append(turn.id)
        if self.bad != "stays":
            self._advance(turn.game)

    def _advance(self, number: int) -> None:
        self.games[number] -= 1
        if not self.games[number]:
            del self.games[number]
            self._ended.append(number)
            self.add_game()

    def drain_returns(self) -> list[EchoReturn]:
        if self.bad == "return":
            return [EchoReturn("0.1", float("inf"))]
        if self.bad == "undue":
            return [EchoReturn("0.1", 1.0)]
        return [EchoReturn(turn, self.pays) for number in self._ended for turn in self._turns.get(number, [])]

    def drain_games(self) -> list[dict[str, Any]]:
        ended, self._ended = self._ended, []
        if self.bad in RECORDS:
            return [RECORDS[self.bad]]
        if self.bad == "record":
            return [{"game": 0, "winner": "draw", "score": Fraction(1, 3)}]
        return [{"game": number, "winner": "draw", "events": [{"game": number, "text": "hm"}]} for number in ended]

    def drain_stats(self) -> dict[str, float]:
        if self.bad == "stats":
            return {"mood": "good"}
        return {"committed": float(len(self.committed))}

    def snapshot(self) -> dict[str, Any]:
        if self.bad == "snapshot":
            raise RuntimeError("cannot be saved")
        if self.bad == "state":
            return {"games": {1, 2}}
        if self.bad == "shared":
            return {"committed": self.committed}
        return {
            "games": [[number, left] for number, left in self.games.items()],
            "started": self.started,
            "turns": [[number, list(turns)] for number, turns in self._turns.items()],
            "committed": [list(each) for each in self.committed],
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        self.games = dict(map(tuple, snapshot["games"]))
        self.started = snapshot["started"]
        self._turns = {number: list(turns) for number, turns in snapshot["turns"]}
        self.committed = [tuple(each) for each in snapshot["committed"]]
