"""Many games at once as a turn environment: turns out, scores of frozen states, one commit each, returns at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from colocated_grpo.environments.town.acting import carry_out
from colocated_grpo.environments.town.casting import FEWEST_SEATS, MOST_SEATS, complaint
from colocated_grpo.environments.town.kpis import Kpis
from colocated_grpo.environments.town.legality import Legal
from colocated_grpo.environments.town.observations import observe
from colocated_grpo.environments.town.phases import begin, to_act
from colocated_grpo.environments.town.players import SCRIPTED
from colocated_grpo.environments.town.playing import scripted_turn
from colocated_grpo.environments.town.prompts import Message, messages
from colocated_grpo.environments.town.rewards import (
    CREDITS,
    Credit,
    Return,
    immediate_reward,
    outcome_returns,
    reward_parts,
)
from colocated_grpo.environments.town.state import (
    DRAW,
    Game,
    Phase,
    Rules,
    TurnRecord,
    from_json,
    new_game,
    to_json,
)
from colocated_grpo.environments.town.structured import reply_pattern
from colocated_grpo.environments.town.verdicts import Verdict, judge

POLICY = "policy"
"""Label of the seats that the trained policy plays."""


class TurnError(ValueError):
    """The turn is not open: its game has moved on, or never asked."""


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
    credit: Credit = field(default_factory=lambda: CREDITS["mix"])
    rules: Rules = field(default_factory=Rules)
    memory: int = 60
    """Latest events that a prompt tells; older ones can be looked up."""

    def __post_init__(self) -> None:
        low, high = self.seat_bounds
        if self.games < 1 or self.memory < 1:
            raise ValueError(f"town: games={self.games} and memory={self.memory} must be at least 1")
        if not FEWEST_SEATS <= low <= high <= MOST_SEATS:
            raise ValueError(f"town: seats={self.seats} is not within {FEWEST_SEATS} to {MOST_SEATS}")
        if self.roles and (wrong := complaint(self.roles)):
            raise ValueError(f"town {wrong}")
        if all(label in SCRIPTED for label in self.players):
            raise ValueError(f"town: players={list(self.players)} are all scripted, so there is no turn to train on")
        if len(self.players) > (len(self.roles) or low):
            raise ValueError(f"town: {len(self.players)} players are more than the {len(self.roles) or low} seats")

    @property
    def seat_bounds(self) -> tuple[int, int]:
        return (self.seats, self.seats) if isinstance(self.seats, int) else self.seats


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A seat that is asked to act: plain data, a picture of the moment."""

    id: str
    """Names one completion of one seat in one game; the same in every run from the same seed and commits."""
    game: int
    seat: int
    name: str
    role: str
    faction: str
    player: str
    phase: str
    day: int
    messages: list[Message]
    legal: Legal
    look_ups: int
    """Look-ups made so far in this turn of the game."""
    max_speech: int

    @property
    def trainable(self) -> bool:
        return self.player == POLICY

    def pattern(self) -> str:
        """Regular expression of the legal replies, for structured output."""
        return reply_pattern(self.legal, self.max_speech)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one completion is worth on the frozen state of its turn."""

    reward: float
    status: int
    """-1 malformed, 0 illegal, +1 fine."""
    code: str
    detail: str
    tag: str
    argument: str
    parts: dict[str, float]


class TownEnvironment:
    """Deterministic: settings and the sequence of commits decide everything, also across snapshot and restore."""

    def __init__(self, settings: TownSettings, on_game_over: Callable[[Game], None] | None = None) -> None:
        """`on_game_over` sees every ended game, before its place is given to a new one."""
        self.settings = settings
        self.kpis = Kpis()
        self._on_game_over = on_game_over
        self._started = 0
        self._returns: list[Return] = []
        self._games = [self._new_game() for _ in range(settings.games)]

    def next_batch(self, limit: int | None = None) -> list[Turn]:
        """Turns that can be acted on now, at most one of each seat. Asking again without a commit gives them again."""
        self._games = [self._until_asked(game) for game in self._games]
        asked = [(game, seat) for game in self._games for seat in _asked_outside(game)]
        return [self._turn(game, seat) for game, seat in asked[:limit]]

    def score(self, turn: Turn, completions: Sequence[str]) -> list[Outcome]:
        """Pure: all completions are judged on the same frozen state and none is carried out."""
        game = self._game_of(turn)
        verdicts = [judge(game, turn.seat, completion, turn.legal) for completion in completions]
        return [self._outcome(game, turn.seat, verdict) for verdict in verdicts]

    def commit(self, turn: Turn, completion: str) -> Outcome:
        """Carries out one completion, once: the turn is closed afterwards."""
        game = self._game_of(turn)
        verdict = judge(game, turn.seat, completion, turn.legal)
        outcome = self._outcome(game, turn.seat, verdict)
        if turn.trainable:
            self.kpis.turn(turn.phase, verdict, outcome.reward)
        # Recorded first: this very act may end the game, and then the ending is credited to it too.
        game.turns.append(TurnRecord(turn.id, turn.seat, turn.phase, outcome.status, outcome.reward))
        carry_out(game, turn.seat, verdict, completion)
        if game.phase is Phase.OVER:
            self._games[self._games.index(game)] = self._replace(game)
        return outcome

    def drain_returns(self) -> list[Return]:
        """What the games that ended since the last call give their turns."""
        returns, self._returns = self._returns, []
        return returns

    def stats(self) -> dict[str, float]:
        return self.kpis.rates()

    def snapshot(self) -> dict[str, Any]:
        """Plain data that json can write."""
        return {
            "started": self._started,
            "games": [to_json(game) for game in self._games],
            "returns": [asdict(each) for each in self._returns],
            "kpis": asdict(self.kpis),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """After it, everything goes on as it would have where the snapshot was taken."""
        if len(snapshot["games"]) != self.settings.games:
            raise ValueError(f"town: games={self.settings.games}, but the snapshot holds {len(snapshot['games'])}")
        self._started = snapshot["started"]
        self._games = [from_json(game) for game in snapshot["games"]]
        self._returns = [Return(**each) for each in snapshot["returns"]]
        self.kpis = Kpis(**deepcopy(snapshot["kpis"]))

    def _new_game(self) -> Game:
        settings, number = self.settings, self._started
        self._started += 1
        # Far apart, so that runs with neighbouring seeds do not share games.
        seed = settings.seed * 1_000_003 + number
        seats = list(settings.roles) or Random(f"{seed}/seats").randint(*settings.seat_bounds)
        game = new_game(number, seed, seats, list(settings.players), settings.rules)
        begin(game)
        return game

    def _until_asked(self, game: Game) -> Game:
        """Plays the scripted seats on, through new games if need be, until somebody outside is asked."""
        while True:
            scripted = [seat for seat in to_act(game) if game.seats[seat].player in SCRIPTED]
            if scripted:
                scripted_turn(game, scripted[0], SCRIPTED[game.seats[scripted[0]].player])
            elif game.phase is Phase.OVER:
                game = self._replace(game)
            else:
                return game

    def _replace(self, game: Game) -> Game:
        """Settles an ended game and gives the one that follows it."""
        self._returns += outcome_returns(game, self.settings.credit)
        self.kpis.game(game.winner or DRAW, game.day)
        if self._on_game_over:
            self._on_game_over(game)
        return self._new_game()

    def _turn(self, game: Game, seat: int) -> Turn:
        holder, view = game.seats[seat], observe(game, seat)
        return Turn(
            id=_turn_id(game, seat),
            game=game.number,
            seat=seat,
            name=holder.name,
            role=holder.role_name,
            faction=str(holder.role.faction),
            player=holder.player,
            phase=str(game.phase),
            day=game.day,
            messages=messages(view, self.settings.memory),
            legal=view.legal,
            look_ups=len(view.dialog),
            max_speech=view.max_speech,
        )

    def _game_of(self, turn: Turn) -> Game:
        for game in self._games:
            if game.number == turn.game and turn.seat in to_act(game) and _turn_id(game, turn.seat) == turn.id:
                return game
        raise TurnError(f"turn {turn.id}: not open; a turn takes exactly one commit")

    def _outcome(self, game: Game, seat: int, verdict: Verdict) -> Outcome:
        parts = reward_parts(game, seat, verdict)
        return Outcome(
            reward=immediate_reward(self.settings.credit, parts),
            status=int(verdict.status),
            code=verdict.code,
            detail=verdict.detail,
            tag=verdict.tag,
            argument=verdict.argument,
            parts=parts,
        )


def _asked_outside(game: Game) -> list[int]:
    return [seat for seat in to_act(game) if game.seats[seat].player not in SCRIPTED]


def _turn_id(game: Game, seat: int) -> str:
    return f"{game.number}.{seat}.{game.seats[seat].acted}"
