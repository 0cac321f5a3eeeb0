"""Many games of town side by side, as a turn environment (see environments/turns/base.py), and their settings."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Literal, Self

from pydantic import Field, model_validator

from colocated_grpo.environments.base import Item, Split
from colocated_grpo.environments.town import legality, state, verdicts
from colocated_grpo.environments.town.phases import enter, seat_result, to_act
from colocated_grpo.environments.town.players import SCRIPTED, scripted_reply, scripted_turn, sensible_player
from colocated_grpo.environments.town.state import Game, Phase, Rules
from colocated_grpo.environments.town.texts import PROMPT_STYLES, Message, Observation, game_record
from colocated_grpo.environments.turns.base import Outcome, Return
from colocated_grpo.environments.user_code.loading import construct, unknown_name
from colocated_grpo.settings.base import Section
from colocated_grpo.settings.sources import FROZEN
from colocated_grpo.types import JsonObject

KEY = "environments 'town'"
POLICY = "policy"
"""Label of the seats that the trained policy plays."""


class TownSettings(Section):
    """The `args` of town. Example: TownSettings(games=8, seats=9, seed=1, players=("policy", "sensible"))"""

    games: int = Field(4, ge=1)
    """Games played side by side. When a game ends, a new game replaces it."""
    seats: int | tuple[int, int] = 7
    """Seats of a game, or (lowest, highest), drawn for each game."""
    roles: tuple[str, ...] = ()
    """The cast, dealt at random. Empty: a playable mix is drawn for each game."""
    seed: int = 0
    players: tuple[str, ...] = (POLICY,)
    """Labels of the players, repeated over the seats. 'sensible' and 'random' are scripts; models play the others."""
    credit: verdicts.Credit = verdicts.CREDITS["phase"]
    rules: Rules = Rules()
    memory: int = Field(60, ge=1)
    """Number of latest events in a prompt. Older events can be looked up."""
    prompts: Literal["full", "brief"] = "full"
    """full: rules and situation in sentences. brief: names and tags, for models of a few million parameters.
    docs/guides/games.md gives the lengths of both styles."""

    @model_validator(mode="after")
    def _is_playable(self) -> Self:
        low, high = self.seat_bounds
        if not state.MIN_SEATS <= low <= high <= state.MAX_SEATS:
            raise ValueError(f"seats={self.seats}: not within {state.MIN_SEATS} to {state.MAX_SEATS}")
        if self.roles and (problem := state.cast_problem(self.roles)):
            raise ValueError(problem)
        if unknown := set(self.players) - {POLICY, FROZEN, *SCRIPTED}:
            raise ValueError(f"players: {min(unknown)!r} is unknown; valid: {', '.join((POLICY, FROZEN, *SCRIPTED))}")
        if POLICY not in self.players:
            rule = "no seat is played by the policy, so there is nothing to train"
            raise ValueError(f"players={list(self.players)}: {rule}; add {POLICY!r}")
        if len(self.players) > (fewest := len(self.roles) or low):
            raise ValueError(f"players={list(self.players)}: more than the {fewest} seats of a game")
        return self

    @property
    def seat_bounds(self) -> tuple[int, int]:
        """(lowest, highest) number of seats."""
        return (self.seats, self.seats) if isinstance(self.seats, int) else self.seats


@dataclass(frozen=True, slots=True, kw_only=True)
class TownTurn:
    """One open turn, as plain data that does not change with the game."""

    id: str
    """'game.seat.count', where count is the number of the seat's completions so far. The id is the same in every run
    with the same seed and commits."""
    game: int
    seat: int
    player: str
    phase: str
    messages: list[Message]
    state: JsonObject = field(compare=False, repr=False)
    """The game without its events and turns: all state that score() needs, in any process."""

    @property
    def trainable(self) -> bool:
        return self.player == POLICY

    def pattern(self) -> str:
        game = state.restore_game(self.state)
        return legality.reply_pattern(legality.legal_actions(game, self.seat), game.rules.max_speech)


class TownEnvironment:
    """Concurrent games. The same settings and commits give the same turns, also across snapshot and restore."""

    def __init__(self, settings: TownSettings) -> None:
        self.settings = settings
        self.stats = verdicts.TownStats()
        self._started = 0
        self._returns: list[Return] = []
        """Returns of ended games that are not drained yet."""
        self._ended: list[JsonObject] = []
        """Records of ended games that are not drained yet."""
        self._games = [self._new_game() for _ in range(settings.games)]

    @property
    def delayed(self) -> bool:
        return self.settings.credit.outcome != 0

    def next_batch(self) -> list[TownTurn]:
        """Return the open turns, oldest game first, one for each seat. Only commit() and play_on() change them."""
        self._games = [self._advance(game) for game in self._games]
        return [turn for game in sorted(self._games, key=lambda game: game.number) for turn in self._turns(game)]

    def add_game(self) -> list[TownTurn]:
        self._games.append(self._advance(self._new_game()))
        return self._turns(self._games[-1])

    def score(self, turn: TownTurn, completions: Sequence[str]) -> list[Outcome]:
        game = state.restore_game(turn.state)
        return [self._outcome(game, turn, verdicts.judge(game, turn.seat, each)) for each in completions]

    def commit(self, turn: TownTurn, completion: str) -> Outcome:
        """Apply one completion to the game and close the turn. Raises ValueError if the turn is not open."""
        game = self._game_of(turn)
        verdict = verdicts.judge(game, turn.seat, completion)
        outcome = self._outcome(game, turn, verdict)
        if turn.trainable:
            self.stats.add_turn(verdict)
        # The turn is recorded first, because the completion may end the game. This turn then has the outcome too.
        game.turns.append((turn.id, turn.seat))
        verdicts.apply_verdict(game, turn.seat, verdict, completion)
        self._replace_if_over(game)
        return outcome

    def play_on(self, turn: TownTurn) -> None:
        """Let the sensible player take the turn."""
        game = self._game_of(turn)
        scripted_turn(game, turn.seat, sensible_player)
        self._replace_if_over(game)

    def advice(self, turn: TownTurn) -> str:
        """Return the sensible player's reply to an open turn."""
        return scripted_reply(self._game_of(turn), turn.seat, sensible_player)

    def drain_returns(self) -> list[Return]:
        returns, self._returns = self._returns, []
        return returns

    def drain_games(self) -> list[JsonObject]:
        ended, self._ended = self._ended, []
        return ended

    def drain_stats(self) -> dict[str, float]:
        """Return rates since the last call. Win rates cover the latest WIN_RATE_GAMES games instead."""
        rates = self.stats.rates()
        self.stats = verdicts.TownStats(winners=self.stats.winners, won=self.stats.won)
        return rates

    def snapshot(self) -> JsonObject:
        return {
            "started": self._started,
            "games": [state.snapshot_game(game) for game in self._games],
            "kpis": asdict(self.stats),
            "returns": [asdict(each) for each in self._returns],
            "ended": list(self._ended),
        }

    def restore(self, snapshot: JsonObject) -> None:
        if len(snapshot["games"]) < self.settings.games:
            raise ValueError(f"town: games={self.settings.games}, but the snapshot holds {len(snapshot['games'])}")
        self._started = snapshot["started"]
        self._games = [state.restore_game(game) for game in snapshot["games"]]
        self._returns = [Return(**each) for each in snapshot["returns"]]
        self._ended = deepcopy(snapshot["ended"])
        self.stats = verdicts.TownStats(**deepcopy(snapshot["kpis"]))

    def _new_game(self) -> Game:
        settings, number = self.settings, self._started
        self._started += 1
        # The factor exceeds the number of games of any run, so runs with neighbouring seeds have no game in common.
        seed = settings.seed * 1_000_003 + number
        seats = list(settings.roles) or Random(f"{seed}/seats").randint(*settings.seat_bounds)
        game = state.new_game(number, seed, seats, list(settings.players), settings.rules)
        enter(game)
        return game

    def _advance(self, game: Game) -> Game:
        """Play scripted seats until a model has the turn. Return its game: `game`, or the new game after its end."""
        while True:
            scripted = [seat for seat in to_act(game) if game.seats[seat].player in SCRIPTED]
            if scripted:
                scripted_turn(game, scripted[0], SCRIPTED[game.seats[scripted[0]].player])
            elif game.phase is Phase.OVER:
                game = self._finish(game)
            else:
                return game

    def _replace_if_over(self, game: Game) -> None:
        if game.phase is Phase.OVER:
            self._games[self._games.index(game)] = self._finish(game)

    def _finish(self, game: Game) -> Game:
        """Record an ended game and return the new game that replaces it."""
        self._returns += verdicts.outcome_returns(game, self.settings.credit)
        results = [(seat.player, seat_result(game, index)) for index, seat in enumerate(game.seats)]
        self.stats.add_game(game.winner or state.DRAW, game.day, results)
        self._ended.append(game_record(game))
        return self._new_game()

    def _turns(self, game: Game) -> list[TownTurn]:
        """Return the open turns that no script plays."""
        views = [Observation(game, seat) for seat in to_act(game) if game.seats[seat].player not in SCRIPTED]
        return [
            TownTurn(
                id=_turn_id(game, view.seat),
                game=game.number,
                seat=view.seat,
                player=game.seats[view.seat].player,
                phase=str(game.phase),
                messages=PROMPT_STYLES[self.settings.prompts](view, self.settings.memory),
                state=state.snapshot_game(replace(game, events=[], turns=[])),  # no score depends on the past
            )
            for view in views
        ]

    def _game_of(self, turn: TownTurn) -> Game:
        for game in self._games:
            if game.number == turn.game and turn.seat in to_act(game) and _turn_id(game, turn.seat) == turn.id:
                return game
        raise ValueError(f"turn {turn.id}: not open; a turn takes exactly one commit")

    def _outcome(self, game: Game, turn: TownTurn, verdict: verdicts.Verdict) -> Outcome:
        legal, credit = verdict.status is verdicts.Status.OK, self.settings.credit
        parts = {
            "form": float(verdict.status),
            "shaping": verdicts.shaping(game, turn.seat, verdict) if legal else 0.0,
            "parse_rate": float(verdict.status is not verdicts.Status.MALFORMED),
            "legal_rate": float(legal),
        }
        return Outcome(credit.form * parts["form"] + credit.shaping * parts["shaping"], parts)


def _turn_id(game: Game, seat: int) -> str:
    return f"{game.number}.{seat}.{game.seats[seat].acted}"


def open_town(seed: int, **args: object) -> TownEnvironment:
    """Build the environment from fields of TownSettings; `credit` may name a mode. Raises EnvironmentSetupError."""
    credit = args.get("credit")
    if isinstance(credit, str):
        if credit not in verdicts.CREDITS:
            raise unknown_name(f"{KEY}: args.credit", "mode", credit, verdicts.CREDITS)
        args["credit"] = verdicts.CREDITS[credit]
    return TownEnvironment(construct(TownSettings, {**args, "seed": seed}, KEY))


class TownLessons:
    """Turns of town, with the sensible player in every seat and its reply as "answer". Args are those of town."""

    def __init__(self, **args: object) -> None:
        self._args = args
        self._judge = open_town(seed=0, **args)

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        town = open_town(seed=2 * seed + (split == "held_out"), **self._args)
        while True:
            for turn in town.next_batch():
                yield {"prompt": turn.messages, "answer": town.advice(turn), "turn": turn}
                town.play_on(turn)

    def score(self, item: Item, completion: str) -> dict[str, float]:
        """Return 1 for a legal reply, else 0. Move quality is not scored: whole games train it."""
        [outcome] = self._judge.score(item["turn"], [completion])
        return {"reward": outcome.parts["legal_rate"], "parse_rate": outcome.parts["parse_rate"]}
