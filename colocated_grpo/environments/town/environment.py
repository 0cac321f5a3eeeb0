"""Many games at once as a turn environment: turns out, scores of frozen states, one commit each, returns at the end."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from colocated_grpo.environments.town.acting import carry_out
from colocated_grpo.environments.town.endings import result
from colocated_grpo.environments.town.events import record
from colocated_grpo.environments.town.kpis import Kpis
from colocated_grpo.environments.town.legality import Legal
from colocated_grpo.environments.town.observations import observe
from colocated_grpo.environments.town.phases import begin, to_act
from colocated_grpo.environments.town.players import SCRIPTED, scripted_reply, scripted_turn, sensible_player
from colocated_grpo.environments.town.prompts import PROMPTS, Message
from colocated_grpo.environments.town.rewards import Return, immediate_reward, outcome_returns, reward_parts
from colocated_grpo.environments.town.settings import POLICY, TownSettings
from colocated_grpo.environments.town.state import (
    DRAW,
    Game,
    Phase,
    TurnRecord,
    from_json,
    frozen,
    new_game,
    to_json,
)
from colocated_grpo.environments.town.structured import reply_pattern
from colocated_grpo.environments.town.verdicts import Status, Verdict, judge


class TurnError(ValueError):
    """The turn is not open: its game has moved on, or never asked."""


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
    state: dict[str, Any] = field(compare=False, repr=False)
    """The frozen game, without its past: all that a score needs, wherever it is taken."""

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

    def __init__(self, settings: TownSettings) -> None:
        self.settings = settings
        self.kpis = Kpis()
        self._started = 0
        self._returns: list[Return] = []
        self._ended: list[dict[str, Any]] = []
        self._games = [self._new_game() for _ in range(settings.games)]

    @property
    def delayed(self) -> bool:
        """Whether the end of a game adds to the rewards of its turns."""
        return self.settings.credit.outcome != 0

    def next_batch(self) -> list[Turn]:
        """Turns that can be acted on now, at most one of each seat, those of the oldest game first.

        Asking again without a commit gives them again.
        """
        self._games = [self._until_asked(game) for game in self._games]
        oldest_first = sorted(self._games, key=lambda game: game.number)
        return [self._turn(game, seat) for game in oldest_first for seat in _asked_outside(game)]

    def add_game(self) -> list[Turn]:
        """One game more from now on; its turns."""
        game = self._until_asked(self._new_game())
        self._games.append(game)
        return [self._turn(game, seat) for seat in _asked_outside(game)]

    def score(self, turn: Turn, completions: Sequence[str]) -> list[Outcome]:
        """Pure: all completions are judged on the state that the turn carries, and none is carried out."""
        game = from_json(turn.state)
        return [self._outcome(game, turn, judge(game, turn.seat, each, turn.legal)) for each in completions]

    def commit(self, turn: Turn, completion: str) -> Outcome:
        """Carries out one completion, once: the turn is closed afterwards."""
        game = self._game_of(turn)
        verdict = judge(game, turn.seat, completion, turn.legal)
        outcome = self._outcome(game, turn, verdict)
        if turn.trainable:
            self.kpis.turn(verdict)
        # Recorded first: this very act may end the game, and then the ending is credited to it too.
        game.turns.append(TurnRecord(turn.id, turn.seat, turn.phase, outcome.status, outcome.reward))
        carry_out(game, turn.seat, verdict, completion)
        self._replace_if_over(game)
        return outcome

    def play_on(self, turn: Turn) -> None:
        """The sensible player takes the turn; nothing is counted and no return will be given for it."""
        game = self._game_of(turn)
        scripted_turn(game, turn.seat, sensible_player)
        self._replace_if_over(game)

    def advice(self, turn: Turn) -> str:
        """What the sensible player would reply in an open turn."""
        return scripted_reply(self._game_of(turn), turn.seat, sensible_player)

    def drain_returns(self) -> list[Return]:
        """What the games that ended since the last call give their turns."""
        returns, self._returns = self._returns, []
        return returns

    def drain_games(self) -> list[dict[str, Any]]:
        """Records of the games that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def drain_stats(self) -> dict[str, float]:
        """Rates since the last call; of wins over the latest games, however old."""
        rates, self.kpis = self.kpis.rates(), self.kpis.after_reset()
        return rates

    def snapshot(self) -> dict[str, Any]:
        """Plain data that json can write."""
        return {
            "started": self._started,
            "games": [to_json(game) for game in self._games],
            "returns": [asdict(each) for each in self._returns],
            "ended": list(self._ended),
            "kpis": asdict(self.kpis),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """After it, everything goes on as it would have where the snapshot was taken."""
        if len(snapshot["games"]) < self.settings.games:
            raise ValueError(f"town: games={self.settings.games}, but the snapshot holds {len(snapshot['games'])}")
        self._started = snapshot["started"]
        self._games = [from_json(game) for game in snapshot["games"]]
        self._returns = [Return(**each) for each in snapshot["returns"]]
        self._ended = deepcopy(snapshot["ended"])
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
                game = self._settled(game)
            else:
                return game

    def _replace_if_over(self, game: Game) -> None:
        if game.phase is Phase.OVER:
            self._games[self._games.index(game)] = self._settled(game)

    def _settled(self, game: Game) -> Game:
        """Closes the books on an ended game and gives the one that follows it."""
        self._returns += outcome_returns(game, self.settings.credit)
        results = [(seat.player, result(game, index)) for index, seat in enumerate(game.seats)]
        self.kpis.game(game.winner or DRAW, game.day, results)
        self._ended.append(record(game))
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
            messages=PROMPTS[self.settings.prompts](view, self.settings.memory),
            legal=view.legal,
            look_ups=len(view.dialog),
            max_speech=view.max_speech,
            state=frozen(game),
        )

    def _game_of(self, turn: Turn) -> Game:
        for game in self._games:
            if game.number == turn.game and turn.seat in to_act(game) and _turn_id(game, turn.seat) == turn.id:
                return game
        raise TurnError(f"turn {turn.id}: not open; a turn takes exactly one commit")

    def _outcome(self, game: Game, turn: Turn, verdict: Verdict) -> Outcome:
        parts = reward_parts(game, turn.seat, verdict)
        rates = {"parse_rate": verdict.status is not Status.MALFORMED, "legal_rate": verdict.status is Status.OK}
        return Outcome(
            reward=immediate_reward(self.settings.credit, parts),
            status=int(verdict.status),
            code=verdict.code,
            detail=verdict.detail,
            tag=verdict.tag,
            argument=verdict.argument,
            parts=parts | {name: float(yes) for name, yes in rates.items()},
        )


def _asked_outside(game: Game) -> list[int]:
    return [seat for seat in to_act(game) if game.seats[seat].player not in SCRIPTED]


def _turn_id(game: Game, seat: int) -> str:
    return f"{game.number}.{seat}.{game.seats[seat].acted}"
