"""A game of textarena whose seats are asked one turn at a time; its seed and what was said make it whole again."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from pydantic import Field, model_validator

from colocated_grpo.config.base import Section
from colocated_grpo.config.turns import FROZEN
from colocated_grpo.environments.adapters.textarena_game import (
    BOARD,
    RANDOM,
    RULES,
    YOUR_TURN,
    Game,
    Message,
    spoken,
    words,
)
from colocated_grpo.environments.turns.credit import OutcomeCredit
from colocated_grpo.environments.user_code.loading import one_line

POLICY = "policy"
"""Label of the seats that the trained policy plays."""
ASKED = (POLICY, FROZEN)
"""Labels of the seats that a model plays; of all others a script."""
DRAW, UNFINISHED, BROKEN = "draw", "unfinished", "broken"
"""Endings without a winner."""
CREDITS = {
    "immediate": OutcomeCredit(),
    "terminal": OutcomeCredit(outcome=1.0),
    "mix": OutcomeCredit(outcome=0.5, discount=0.97),
}
"""Credit modes by name."""


class TableSettings(Section):
    """One kind of table."""

    game: str
    """Its id in textarena. Example: TicTacToe-v0"""
    games: int = Field(4, ge=1)
    """Played side by side; one that ends is followed by a new one."""
    seats: int = Field(2, ge=1)
    """SecretMafia takes 6 to 15."""
    players: tuple[str, ...] = Field((POLICY,), min_length=1)
    """Labels dealt round the table, from the next seat on in each game: 'policy', 'frozen' (the entry's opponent),
    'random' (a legal move that the game has shown), or your own 'module:function'."""
    options: dict[str, Any] = {}
    """Keyword arguments of the game. Example: {discussion_rounds: 1}"""
    credit: OutcomeCredit = CREDITS["terminal"]
    """What the end of a game adds to its earlier turns: 'immediate', 'terminal', 'mix', or {outcome, discount}."""
    invalid_reward: float = -1.0
    """Of a reply that says nothing, or that the game refuses. All others are worth 0."""
    max_turns: int = Field(100, ge=1)
    """Of all seats together. A game that is not over then is cut short."""
    unfinished_reward: float = -1.0
    """Of every seat in a game cut short. As bad as a lost one: else stalling would pay."""
    memory: int = Field(60, ge=1)
    """Latest messages that a prompt tells, beside the rules."""
    instruction: str = ""
    """Ends the prompt."""

    @model_validator(mode="after")
    def _check_players(self) -> TableSettings:
        if POLICY not in self.players:
            raise ValueError(f"players={list(self.players)}: the policy plays none, so there is no turn to train on")
        if len(self.players) > self.seats:
            raise ValueError(f"{len(self.players)} players are more than the {self.seats} seats")
        for label in self.players:
            if label not in (*ASKED, RANDOM) and ":" not in label:
                known = ", ".join((*ASKED, RANDOM))
                raise ValueError(f"players: {label!r} is none of {known} and your own 'module:function'")
        return self


@dataclass(frozen=True, slots=True)
class Said:
    """One turn that was carried out."""

    seat: int
    move: str
    legal: bool
    turn_id: str = ""
    """Of the turn that was asked for; empty where a script played."""


@dataclass(slots=True)
class Table:
    """A game under way. The seat whose turn it is has always read what there is for it."""

    settings: TableSettings
    number: int
    seed: int
    said: list[Said] = field(default_factory=list)
    rewards: list[float] | None = None
    """By seat, once the game is over."""
    ending: str = ""
    """Then the roles that won, or why nobody did."""
    error: str = ""
    """What a broken game raised."""
    game: Game = field(init=False)

    def __post_init__(self) -> None:
        self.game = Game(self.settings.game, self.settings.options, self.settings.seats, self.seed)
        self.game.listen()

    def player(self, seat: int) -> str:
        """The label of who plays the seat."""
        labels = self.settings.players
        return labels[(seat + self.number) % len(labels)]

    def play(self, move: str, turn_id: str = "") -> Said:
        """Carry a move out. What the game raises ends it, without a result."""
        seat, legal = self.game.seat, False
        try:
            legal = self.game.play(move)
            self._go_on(len(self.said) + 1)
        except (Exception, SystemExit) as error:
            self._end(BROKEN, 0.0)
            self.error = one_line(error)
        said = Said(seat, move, legal, turn_id)
        self.said.append(said)
        return said

    def _go_on(self, turns: int) -> None:
        seats = range(self.settings.seats)
        if self.game.over:
            self.rewards = [self.game.result(seat)[0] for seat in seats]
            winners = dict.fromkeys(self.game.role(seat) for seat in seats if self.rewards[seat] > 0)
            self.ending = ", ".join(winners) or DRAW
        elif turns >= self.settings.max_turns:
            self._end(UNFINISHED, self.settings.unfinished_reward)
        else:
            self.game.listen()

    def _end(self, ending: str, reward: float) -> None:
        self.ending, self.rewards = ending, [reward] * self.settings.seats

    def replay(self, moves: Iterable[str]) -> Table:
        """Itself, moves later."""
        for move in moves:
            self.play(move)
        return self

    def copy(self) -> Table:
        other = copy(self)
        other.game, other.said = self.game.copy(), list(self.said)
        return other

    def prompt(self) -> str:
        """What the seat whose turn it is reads: the rules, the latest messages, and of boards the one that stands."""
        messages = self.game.heard()
        boards = [place for place, (_, _, kind) in enumerate(messages) if kind.name == BOARD]
        stale = set(boards[:-1])
        fresh = [message for place, message in enumerate(messages) if place not in stale]
        rules = [message for message in fresh if _is_rules(message)]
        latest = [message for message in fresh if not _is_rules(message)][-self.settings.memory :]
        return "\n".join(filter(None, [words([*rules, *latest]), YOUR_TURN, self.settings.instruction]))

    def snapshot(self) -> dict[str, Any]:
        """Plain data."""
        said = [asdict(each) for each in self.said]
        return {"number": self.number, "seed": self.seed, "said": said, "read": _digest(self)}

    @classmethod
    def restored(cls, settings: TableSettings, snapshot: dict[str, Any]) -> Table:
        """Played again, and compared with what the seat had read."""
        said = [Said(**each) for each in snapshot["said"]]
        table = cls(settings, snapshot["number"], snapshot["seed"]).replay(each.move for each in said)
        table.said = said
        if _digest(table) != snapshot["read"]:
            raise ValueError(f"{settings.game} does not repeat itself from its seed and its moves")
        return table

    def record(self) -> dict[str, Any]:
        """The ended game, for the run folder."""
        seats = [
            {"name": f"Player {seat}", "role": self.game.role(seat), "player": self.player(seat), "reward": reward}
            for seat, reward in enumerate(self.rewards)
        ]
        events = [
            {
                "game": self.number,
                "number": number,
                "seat": said.seat,
                "role": self.game.role(said.seat),
                "player": self.player(said.seat),
                "legal": said.legal,
                "text": said.move,
            }
            for number, said in enumerate(self.said)
        ]
        return {
            "game": self.number,
            "seed": self.seed,
            "winner": self.ending,
            "turns": len(self.said),
            "error": self.error,
            "seats": seats,
            "transcript": self._transcript(),
            "events": events,
        }

    def _transcript(self) -> str:
        """Everything that was said to anybody, in order; once where several seats were told the same."""
        lines = [spoken(sender, text) for sender, text in self.game.log()]
        told = [line for place, line in enumerate(lines) if place == 0 or line != lines[place - 1]]
        seats = range(self.settings.seats)
        cast = ", ".join(f"Player {seat} ({self.game.role(seat)}, {self.player(seat)})" for seat in seats)
        result = f"The game is over: {self.ending}. {self.error}".rstrip()
        return "\n".join([f"Seats: {cast}", *told, result]) + "\n"


def _is_rules(message: Message) -> bool:
    return message[2].name == RULES


def _digest(table: Table) -> str:
    read = f"{table.game.seat}\n{table.game.transcript()}"
    return sha256(read.encode(errors="surrogatepass")).hexdigest()
