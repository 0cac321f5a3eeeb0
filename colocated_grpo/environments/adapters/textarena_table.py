"""A game of textarena, turn by turn.

Seed and moves reproduce a game, so a snapshot contains only seed, moves and a digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Self

from pydantic import Field, model_validator

from colocated_grpo.environments.adapters.textarena import (
    BOARD,
    RANDOM,
    RULES,
    YOUR_TURN,
    GameMessage,
    TextArenaGame,
    kind_name,
    render,
    render_message,
)
from colocated_grpo.environments.turns.base import OutcomeCredit
from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.settings.base import Section
from colocated_grpo.settings.turns import FROZEN
from colocated_grpo.types import JsonObject

POLICY = "policy"
"""Label of the seats that the trained policy plays."""
MODEL_PLAYERS = (POLICY, FROZEN)
"""Labels of the seats that a model plays. Scripts play all other seats."""
DRAW, UNFINISHED, BROKEN = "draw", "unfinished", "broken"
"""Endings without a winner."""
CREDITS = {
    "immediate": OutcomeCredit(),
    "terminal": OutcomeCredit(outcome=1.0),
    "mix": OutcomeCredit(outcome=0.5, discount=0.97),
}
"""Credit by the name in `args.credit`."""


class TextArenaSettings(Section):
    """The `args` of a textarena game under `type: turns`."""

    game: str
    """Id of the game in textarena. Example: TicTacToe-v0"""
    games: int = Field(4, ge=1)
    """Games played side by side. When a game ends, a new game replaces it."""
    seats: int = Field(2, ge=1)
    """Number of seats. SecretMafia takes 6 to 15."""
    players: tuple[str, ...] = Field((POLICY,), min_length=1)
    """Labels of the players, repeated over the seats and shifted by one seat in each game: 'policy', 'frozen' (the
    entry's opponent), 'random' (a random legal move that the game has shown), or your own 'module:function'."""
    options: JsonObject = {}
    """Keyword arguments of the game. Example: {discussion_rounds: 1}"""
    credit: OutcomeCredit = CREDITS["terminal"]
    """Share of the result credited to the earlier turns of a seat: 'immediate', 'terminal', 'mix', or {outcome,
    discount}."""
    invalid_reward: float = -1.0
    """Immediate reward of a reply that is empty or that the game rejects. Legal replies get 0."""
    max_turns: int = Field(100, ge=1)
    """Maximum turns of all seats together. A game with more turns is cut short."""
    unfinished_reward: float = -1.0
    """Reward of every seat in a game that is cut short. The default equals a loss, so that stalling does not pay."""
    memory: int = Field(60, ge=1)
    """Number of latest messages in a prompt, in addition to the rules."""
    instruction: str = ""
    """Text at the end of the prompt."""

    @model_validator(mode="after")
    def _check_players(self) -> Self:
        if POLICY not in self.players:
            raise ValueError(
                f"players={list(self.players)}: no seat is played by the policy, so there is nothing to train; "
                f"add {POLICY!r}"
            )
        if len(self.players) > self.seats:
            raise ValueError(f"players={list(self.players)}: more than seats={self.seats}")
        for label in self.players:
            if label not in (*MODEL_PLAYERS, RANDOM) and ":" not in label:
                known = ", ".join((*MODEL_PLAYERS, RANDOM))
                raise ValueError(f"players: {label!r} is unknown; valid: {known}, or your own 'module:function'")
        return self


@dataclass(frozen=True, slots=True)
class Move:
    """One played turn. Field names are keys of checkpoints."""

    seat: int
    move: str
    legal: bool
    turn_id: str = ""
    """Id of the committed turn. Empty if a script played the turn."""


@dataclass(slots=True)
class TextArenaTable:
    """A game in progress. The seat whose turn it is has always read its new messages."""

    settings: TextArenaSettings
    number: int
    seed: int
    moves: list[Move] = field(default_factory=list)
    rewards: list[float] | None = None
    """Rewards by seat. None until the game is over."""
    ending: str = ""
    """Roles that won, or DRAW, UNFINISHED or BROKEN. Empty until the game is over."""
    error: str = ""
    """Error line of a game that raised an exception."""
    game: TextArenaGame = field(init=False)

    def __post_init__(self) -> None:
        self.game = TextArenaGame(self.settings.game, self.settings.options, self.settings.seats, self.seed)
        self.game.read_new()

    def player(self, seat: int) -> str:
        """Return the label of the seat's player."""
        labels = self.settings.players
        return labels[(seat + self.number) % len(labels)]

    def play(self, text: str, turn_id: str = "") -> Move:
        """Play a move. If the game raises an exception, it ends as BROKEN, with reward 0 for all seats."""
        seat, legal = self.game.seat, False
        try:
            legal = self.game.play(text)
            self._advance(len(self.moves) + 1)
        except (Exception, SystemExit) as error:
            self._end(BROKEN, 0.0)
            self.error = one_line(error)
        move = Move(seat, text, legal, turn_id)
        self.moves.append(move)
        return move

    def _advance(self, turns: int) -> None:
        """Store the result if the game is over, end a game that has too many turns, or else read new messages."""
        if self.game.over:
            seats = range(self.settings.seats)
            self.rewards = [self.game.result(seat)[0] for seat in seats]
            winners = dict.fromkeys(self.game.role(seat) for seat in seats if self.rewards[seat] > 0)
            self.ending = ", ".join(winners) or DRAW
        elif turns >= self.settings.max_turns:
            self._end(UNFINISHED, self.settings.unfinished_reward)
        else:
            self.game.read_new()

    def _end(self, ending: str, reward: float) -> None:
        self.ending, self.rewards = ending, [reward] * self.settings.seats

    def results(self) -> list[float]:
        """Return the rewards of an ended game, by seat."""
        assert self.rewards is not None, "the game is not over"
        return self.rewards

    def replay(self, moves: Iterable[str]) -> TextArenaTable:
        """Play the moves in order; return this table."""
        for move in moves:
            self.play(move)
        return self

    def copy(self) -> TextArenaTable:
        other = copy(self)
        other.game, other.moves = self.game.copy(), list(self.moves)
        return other

    def prompt(self) -> str:
        """Return the prompt of the seat whose turn it is: rules, latest messages, and only the latest board."""
        messages = self.game.messages()
        boards = [index for index, (_, _, kind) in enumerate(messages) if kind_name(kind) == BOARD]
        outdated = set(boards[:-1])
        current = [message for index, message in enumerate(messages) if index not in outdated]
        rules = [message for message in current if _is_rules(message)]
        latest = [message for message in current if not _is_rules(message)][-self.settings.memory :]
        return "\n".join(filter(None, [render([*rules, *latest]), YOUR_TURN, self.settings.instruction]))

    def snapshot(self) -> JsonObject:
        """Return plain data that json can write."""
        moves = [asdict(move) for move in self.moves]
        return {"number": self.number, "seed": self.seed, "moves": moves, "read": _digest(self)}

    @classmethod
    def restore(cls, settings: TextArenaSettings, snapshot: JsonObject) -> TextArenaTable:
        """Replay the game of a snapshot.

        Raises ValueError if the seat whose turn it is then reads different messages than before the snapshot.
        """
        moves = [Move(**each) for each in snapshot["moves"]]
        table = cls(settings, snapshot["number"], snapshot["seed"]).replay(each.move for each in moves)
        table.moves = moves
        if _digest(table) != snapshot["read"]:
            raise ValueError(f"{settings.game} is not reproducible from its seed and its moves")
        return table

    def record(self) -> JsonObject:
        """Return the ended game for the run folder: seats and result, transcript, and one row for each turn."""
        seats = [
            {"name": f"Player {seat}", "role": self.game.role(seat), "player": self.player(seat), "reward": reward}
            for seat, reward in enumerate(self.results())
        ]
        events = [
            {
                "game": self.number,
                "number": number,
                "seat": move.seat,
                "role": self.game.role(move.seat),
                "player": self.player(move.seat),
                "legal": move.legal,
                "text": move.move,
            }
            for number, move in enumerate(self.moves)
        ]
        return {
            "game": self.number,
            "seed": self.seed,
            "winner": self.ending,
            "turns": len(self.moves),
            "error": self.error,
            "seats": seats,
            "transcript": self._transcript(),
            "events": events,
        }

    def _transcript(self) -> str:
        """Return the messages to all seats in order. A message that went to several seats in a row appears once."""
        lines = [render_message(sender, text) for sender, text in self.game.log()]
        distinct = [line for index, line in enumerate(lines) if index == 0 or line != lines[index - 1]]
        seats = range(self.settings.seats)
        cast = ", ".join(f"Player {seat} ({self.game.role(seat)}, {self.player(seat)})" for seat in seats)
        result = f"The game is over: {self.ending}. {self.error}".rstrip()
        return "\n".join([f"Seats: {cast}", *distinct, result]) + "\n"


def _is_rules(message: GameMessage) -> bool:
    return kind_name(message[2]) == RULES


def _digest(table: TextArenaTable) -> str:
    """Return a hash of the seat whose turn it is and of everything that it has read."""
    read = f"{table.game.seat}\n{table.game.transcript()}"
    return sha256(read.encode(errors="surrogatepass")).hexdigest()
