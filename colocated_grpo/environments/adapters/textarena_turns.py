"""Self-play in textarena, turn by turn. By default the policy plays every seat and is trained on all turns.

A turn carries the seed of its game and the moves so far. To score completions of the turn, any process replays the game
up to the turn and tries each completion on a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random

from colocated_grpo.environments.adapters.textarena import (
    KEY,
    ScriptedPlayer,
    check_known,
    move_of,
    random_move,
    scripted_player,
)
from colocated_grpo.environments.adapters.textarena_table import (
    BROKEN,
    CREDITS,
    DRAW,
    MODEL_PLAYERS,
    POLICY,
    UNFINISHED,
    TextArenaSettings,
    TextArenaTable,
)
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.turns.base import FinishedGames, PlainOutcome, PlainReturn, win_rates
from colocated_grpo.environments.user_code.loading import construct, resolve_mode
from colocated_grpo.types import JsonObject

WIN_RATE_GAMES = 100
"""Number of latest games that win rates cover."""
MAX_GAMES = 100
"""Maximum consecutive games that end before a model has the turn. Also the maximum number of broken games before the
first intact game."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextArenaTurn:
    """One open turn, as plain data."""

    id: str
    """'game.moves'. The number of moves before this turn identifies the turn within its game."""
    game: int
    seat: int
    player: str
    phase: str
    """Role of the seat as a metric name: 'mafia', 'player_0'."""
    messages: str
    seed: int
    moves: tuple[str, ...] = field(repr=False)
    """Moves before this turn."""

    @property
    def trainable(self) -> bool:
        return self.player == POLICY

    def pattern(self) -> str:
        raise EnvironmentSetupError(f"{KEY}: structured=true: textarena has no grammar of legal replies; leave it out")


class TextArenaTurns(FinishedGames):
    """Concurrent games. The same settings, seed and commits give the same turns, also across snapshot and restore."""

    def __init__(self, seed: int, **args: object) -> None:
        """args: fields of TextArenaSettings, where `credit` may be the name of a mode."""
        super().__init__()
        self.settings: TextArenaSettings = construct(TextArenaSettings, resolve_mode(args, "credit", CREDITS, KEY), KEY)
        check_known(self.settings.game)
        self._scripts = {
            label: scripted_player(label, f"{KEY}: args.players")
            for label in self.settings.players
            if label not in MODEL_PLAYERS
        }
        self._seed = seed
        self._started = 0
        self._counts: Counter[str] = Counter()
        self._results: list[dict[str, float]] = []
        self._tables = [self._advance(self._new_table()) for _ in range(self.settings.games)]

    @property
    def delayed(self) -> bool:
        return self.settings.credit.outcome != 0

    def next_batch(self) -> list[TextArenaTurn]:
        return [self._turn(table) for table in self._tables]

    def add_game(self) -> list[TextArenaTurn]:
        self._tables.append(self._advance(self._new_table()))
        return [self._turn(self._tables[-1])]

    def score(self, turn: TextArenaTurn, completions: Sequence[str]) -> list[PlainOutcome]:
        table = TextArenaTable(self.settings, turn.game, turn.seed).replay(turn.moves)
        if table.rewards is not None or table.prompt() != turn.messages:
            raise RuntimeError(f"{self.settings.game} is not reproducible from its seed and its moves")
        return [self._outcome(table.copy(), turn.seat, move_of(each)) for each in completions]

    def _outcome(self, table: TextArenaTable, seat: int, move: str) -> PlainOutcome:
        """Play the move on `table`, which is a copy, and score it."""
        legal = table.play(move).legal and bool(move)
        end = 0.0 if table.rewards is None else table.rewards[seat]
        reward = end if legal else end + self.settings.invalid_reward
        return PlainOutcome(reward, {"parse_rate": float(bool(move)), "legal_rate": float(legal), "end": end})

    def commit(self, turn: TextArenaTurn, completion: str) -> None:
        index = self._index_of(turn)
        self._tables[index].play(move_of(completion), turn.id)
        self._tables[index] = self._advance(self._tables[index])

    def play_on(self, turn: TextArenaTurn) -> None:
        index = self._index_of(turn)
        self._scripted_turn(self._tables[index], random_move)
        self._tables[index] = self._advance(self._tables[index])

    def drain_stats(self) -> dict[str, float]:
        """Return counts of games since the last call, and win rates of the latest games by role.

        If there are several players, win rates by player are added.
        """
        counts, self._counts = self._counts, Counter()
        stats = {name: float(counts[name]) for name in ("games", UNFINISHED, BROKEN)}
        if counts["games"]:
            stats["turns_per_game"] = counts["turns"] / counts["games"]
        for name in sorted({name for result in self._results for name in result}):
            shares = [result[name] for result in self._results if name in result]
            stats[f"win_rate/{name}"] = sum(shares) / len(shares)
        return stats

    def snapshot(self) -> JsonObject:
        return {
            "started": self._started,
            "tables": [table.snapshot() for table in self._tables],
            **self._finished_state(),
            "counts": dict(self._counts),
            "results": list(self._results),
        }

    def restore(self, snapshot: JsonObject) -> None:
        if len(snapshot["tables"]) < self.settings.games:
            raise ValueError(f"games={self.settings.games}, but the snapshot holds {len(snapshot['tables'])}")
        self._started = snapshot["started"]
        self._tables = [TextArenaTable.restore(self.settings, table) for table in snapshot["tables"]]
        self._restore_finished(snapshot)
        self._counts = Counter(snapshot["counts"])
        self._results = deepcopy(snapshot["results"])

    def _new_table(self) -> TextArenaTable:
        number = self._started
        self._started += 1
        # The parity is that of the environment's own seed: even seeds are for training, odd seeds are held out.
        seed = 2 * Random(f"{self._seed}/{number}").randrange(2**30) + self._seed % 2
        return TextArenaTable(self.settings, number, seed)

    def _advance(self, table: TextArenaTable) -> TextArenaTable:
        """Play scripted seats until a model has the turn, and return the table.

        If the game ends first, the returned table is that of a new game.
        """
        for _ in range(MAX_GAMES):
            while table.rewards is None:
                script = self._scripts.get(table.player(table.game.seat))
                if script is None:
                    return table
                self._scripted_turn(table, script)
            self._finish(table)
            table = self._new_table()
        raise RuntimeError(f"{self.settings.game}: {MAX_GAMES} games in a row ended before a turn of the policy")

    def _scripted_turn(self, table: TextArenaTable, script: ScriptedPlayer) -> None:
        table.play(script(table.game, Random(f"{table.seed}/{len(table.moves)}")))

    def _finish(self, table: TextArenaTable) -> None:
        """Store the returns, counts, win rates and record of an ended game."""
        if self.delayed:
            self._returns += self._returns_of(table)
        self._counts.update({"games": 1, table.ending: 1, "turns": len(table.moves)})
        self._ended.append(table.record())
        if table.ending != BROKEN:
            self._results = [*self._results[1 - WIN_RATE_GAMES :], self._result_of(table)]
        elif not self._results and table.number >= MAX_GAMES:
            raise RuntimeError(f"{self.settings.game}: every game raises an exception; the latest: {table.error}")

    def _returns_of(self, table: TextArenaTable) -> list[PlainReturn]:
        rewards = table.results()
        committed = [move for move in table.moves if move.turn_id]
        shares = self.settings.credit.weights([move.seat for move in committed])
        return [
            # The last move of a game already got the result when it was scored, so its return is 0.
            PlainReturn(move.turn_id, 0.0 if move is table.moves[-1] else share * rewards[move.seat])
            for move, share in zip(committed, shares, strict=True)
        ]

    def _result_of(self, table: TextArenaTable) -> dict[str, float]:
        """Return 'draw' (1.0 or 0.0) and the fraction of seats that won, by role.

        If there are several players, the fractions by player are added.
        """
        rewards = list(enumerate(table.results()))
        results = [(table.game.role(seat), reward) for seat, reward in rewards]
        if len(set(self.settings.players)) > 1:
            results += [(table.player(seat).rpartition(":")[2], reward) for seat, reward in rewards]
        won = win_rates((_metric_name(name), reward) for name, reward in results)
        return {"draw": float(table.ending == DRAW)} | won

    def _turn(self, table: TextArenaTable) -> TextArenaTurn:
        seat = table.game.seat
        return TextArenaTurn(
            id=_turn_id(table),
            game=table.number,
            seat=seat,
            player=table.player(seat),
            phase=_metric_name(table.game.role(seat)),
            messages=table.prompt(),
            seed=table.seed,
            moves=tuple(move.move for move in table.moves),
        )

    def _index_of(self, turn: TextArenaTurn) -> int:
        for index, table in enumerate(self._tables):
            if _turn_id(table) == turn.id:
                return index
        raise ValueError(f"turn {turn.id}: not open; a turn takes exactly one commit")


def _turn_id(table: TextArenaTable) -> str:
    return f"{table.number}.{len(table.moves)}"


def _metric_name(name: str) -> str:
    """Return the metric name of a role or player: 'player_0' for 'Player 0'."""
    return name.lower().replace(" ", "_")
